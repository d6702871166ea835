// 1. The reader's text, as tokens, tinted by surprise; the bar; where own files are opened.

const PRESETS = [
  ["the program", () => chapter.text],
  ["agent", () => "The agent opened a pull request, then merged it after the tests had passed."],
  ["trophy", () => "The trophy didn't fit in the suitcase because it was too big."],
  ["review", () => "The reviewer who read the code approved the change because it was small."],
  ["trophy, twice", () => `${PRESETS[2][1]()} ${PRESETS[2][1]()}`],
  ["random, twice", () => randomTwice(20, 7).slice(1).map((id) => words.piece(id)).map(({ text, hex }) => (hex ? "" : text)).join("")],
];

let typing = 0; // the timer of a text that is not run yet
section("type", {
  build() {
    const text = byId("text");
    fill("presets", ...PRESETS.map(([name, make]) => button(name, () => {
      text.value = make();
      change({ text: text.value, query: 0 });
    })));
    text.oninput = () => {
      clearTimeout(typing);
      typing = setTimeout(() => {
        typing = 0;
        change({ text: text.value });
      }, 80);
    };
    rove(byId("tokens"), 1, { label: "The text as tokens. Left and right arrow keys choose a token.", pick: (node) => lookAt({ query: Number(node.dataset.item) }) });
    byId("files").onchange = async (event) => {
      try {
        await openFiles(event.target.files);
      } catch (error) {
        say("files-said", "");
        appendText(byId("files-said"), `Not opened: ${error.message}`);
      }
      event.target.value = "";
    };
    const { H, L, width, vocab } = model;
    say("model-said", `${L} layers of ${H} heads, width ${width}, ${thousands(vocab)} tokens to choose from.`);
  },
  draw(run) {
    // A key that was pressed while the last text ran must not be undone by the drawing of that text.
    if (!typing && byId("text").value !== state.text) byId("text").value = state.text;
    say("left", run.left ? `The first ${run.ids.length} tokens are run; ${plural(run.left, "token")} of the text stay outside.` : "");
    this.look(run);
  },
  look(run) {
    tokenBoxes(byId("tokens"), (t) => ({ share: t ? run.now.each[t - 1] / 12 : 0, title: t ? `${run.now.each[t - 1].toFixed(2)} nats` : "the beginning" }), (t) => lookAt({ query: t }));
    const t = state.query;
    const { hex } = run.pieces[t];
    const said = byId("token-said");
    const surprise = t ? `; its surprise is ${run.now.each[t - 1].toFixed(2)} nats: the model gave it a probability of ${Number((100 * Math.exp(-run.now.each[t - 1])).toPrecision(2))} %` : "; nothing stands before it, so nothing is predicted";
    said.replaceChildren("Token ", el("bdi", {}, tokenLabel(t)), ` has id ${run.ids[t]}${hex ? `, bytes ${hex}` : ""}${surprise}. The model's probabilities of the token after it:`);
    const next = likeliest(run.now.logits, t, model.vocab, 5);
    fill("expects", barList(next.map(({ id, chance }) => [plainText(words.piece(id).text, 16), chance, chance.toFixed(2)]), 1));
  },
});

// --- the bar ---------------------------------------------------------------------------------------------------------

function buildBar() {
  byId("undo").addEventListener("click", undo);
  byId("reset").addEventListener("click", reset);
  byId("theme").addEventListener("click", nextTheme);
}

on("run", (run) => {
  const { loss } = run.now;
  const more = loss - run.plain.loss;
  const list = changes();
  say("bar-tokens", String(run.ids.length));
  say("bar-loss", loss.toFixed(3));
  const said = byId("bar-more");
  said.textContent = list.length ? signed(more) : WORDS.untouched;
  said.className = !list.length ? "" : more > 5e-4 ? "worse" : more < -5e-4 ? "better" : "";
  fill("bar-next", ...likeliest(run.now.logits, run.ids.length - 1, model.vocab, 3).map(({ id, chance }) => el("span", {}, el("bdi", {}, plainText(words.piece(id).text, 10)), ` ${chance.toFixed(2)}`)));
  say("bar-changes", list.length ? (list.length < 3 ? list.join(", ") : `${list.length} changes`) : "no change");
  byId("bar-changes").title = list.join(", ");
  byId("undo").disabled = !past.length;
  byId("reset").disabled = !list.length;
  tell(`${list.join(", ") || WORDS.untouched}. Loss ${loss.toFixed(3)}${list.length ? `, ${more >= 0 ? "up" : "down"} ${Math.abs(more).toFixed(3)}` : ""}.`);
});
