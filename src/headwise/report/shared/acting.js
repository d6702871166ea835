// Token text: shown so that nothing in it acts, and nothing in it hides.

// Unicode category C (controls, bidi marks, zero-width, surrogates, unassigned), and the two line separators.
const ACTING = /[\p{C}\u2028\u2029]/u;

const NAMES = { "\n": "\u23ce", "\t": "\u21e5", "\r": "\u240d" };

function nameOf(character) {
  const code = character.codePointAt(0);
  if (NAMES[character]) return NAMES[character];
  if (code < 32) return String.fromCodePoint(0x2400 + code);
  return `U+${code.toString(16).toUpperCase().padStart(4, "0")}`;
}

// For axes and sentences: one line, every acting character named, the outer spaces marked.
function plainText(text, limit = 24) {
  const characters = [...text.slice(0, 4 * limit)];
  let shown = characters.slice(0, limit).map((c) => (ACTING.test(c) ? nameOf(c) : c)).join("");
  shown = shown.replace(/^ +| +$/g, (spaces) => "\u00b7".repeat(spaces.length));
  if (/^\p{M}/u.test(shown)) shown = `\u25cc${shown}`; // a lone accent needs something to sit on
  return characters.length > limit ? `${shown}\u2026` : shown;
}

// For the running text: the node's textContent is the token itself, to the letter; what acts is wrapped where it can do
// no harm (its own bidi isolate, no width) and named by CSS.
function appendText(node, text) {
  let run = "";
  const flush = () => {
    if (run) node.append(run);
    run = "";
  };
  for (const character of text) {
    if (ACTING.test(character)) {
      flush();
      node.append(el("span", { className: character === "\n" ? "line" : "acting", "data-show": nameOf(character) }, character));
    } else run += character;
  }
  flush();
}
