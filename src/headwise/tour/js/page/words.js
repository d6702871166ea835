// Labels that the scripts write: for a translation, this file and the chapter.

const WORDS = {
  keyValueHeads: (kv) => `${kv} key-value head${kv === 1 ? "" : "s"}`,
  switched: { mask: "mask off", positions: "positions off", scale: "scale off", patterns: "one pattern a layer" },
  untouched: "the untouched model",
  oddAddress: "Part of the address was not understood and is left out.",
  plainEngine: "WebAssembly is off here, so the page computes in plain JavaScript: the same numbers, several times slower.",
  failed: "The model could not be started: ",
};
