// 8. The induction laboratory: random tokens twice, the circuit behind it, and how it formed.

let lab = null;

section("learn", {
  build() {
    const most = Math.min(79, Math.floor((Math.min(LONGEST, model.positions) - 1) / 2));
    byId("lab-period").max = String(most);
    byId("lab-period").oninput = (event) => {
      lab = new Laboratory(Number(event.target.value));
      this.stale = true;
      refresh();
    };
    lab = new Laboratory(Math.min(40, most));
    byId("lab-period").value = String(lab.period);
    const curve = chapter.formation;
    byId("formation").hidden = !curve.length;
    if (curve.length) {
      const lines = [{ name: "best previous-token head", colour: 0, points: curve.map(([step, , previous]) => [step, previous]) }, { name: "best induction head", colour: 1, points: curve.map(([step, , , induction]) => [step, induction]) }];
      fill("formation-chart", keyOf(lines), lineChart({ lines, x: { range: [0, curve.at(-1)[0]] }, y: [0, 1], label: "Scores of the best heads by training step", xName: "training step", yName: "score, from 0 to 1" }), numbersOf(["step", "held-out loss", "previous-token", "induction"], curve.map(([step, ...row]) => [String(step), ...row.map((value) => value.toFixed(3))])));
    }
  },
  async draw(run) {
    say("lab-period-said", String(lab.period));
    const here = lab;
    const whole = await here.untouched(FIGURE);
    const now = whole && (await here.run(optionsNow(), state.off, FIGURE));
    if (!now || here !== lab || current !== run) return; // a newer drawing has begun
    const [scores, circuit] = [here.induction(now), here.circuit(whole)];
    byId("lab-period").setAttribute("aria-valuetext", `${lab.period} tokens, then the same again`);
    const svg = picture(640, 170, `Loss of each token: first copy ${now.first.toFixed(2)}, second copy ${now.second.toFixed(2)} nats`);
    const [from, wide] = [34, 600 / now.each.length];
    const y = d3.scaleLinear([0, 15], [150, 8]);
    put(svg, "g", { class: "grid", transform: `translate(${from},0)` }).call(d3.axisLeft(y).ticks(4).tickSize(from - 634));
    now.each.forEach((value, t) => put(svg, "rect", { class: t < lab.period ? "mass" : "second", x: from + t * wide, width: Math.max(wide - 1, 0.5), y: y(Math.min(value, 15)), height: 150 - y(Math.min(value, 15)) }).append("title").text(`token ${t + 1}: ${value.toFixed(2)} nats`));
    put(svg, "text", { class: "name", x: from + 4, y: 166 }).text("first copy");
    put(svg, "text", { class: "name", x: from + lab.period * wide + 4, y: 166 }).text("second copy");
    fill("lab-chart", svg.node());
    say("lab-said", `Loss of the first copy ${now.first.toFixed(2)}, of the second ${now.second.toFixed(2)} nats a token.${changes().length ? ` Untouched: ${whole.first.toFixed(2)} and ${whole.second.toFixed(2)}.` : ""}`);
    this.circuit(circuit, scores);
    this.switch("lab-first", circuit.first ? [circuit.first] : [], (names) => (names ? `${names}, which looks one token back` : "no head looks one token back"));
    this.switch("lab-second", circuit.induction, (names) => `the induction heads (${names || "none"})`);
  },
  // A button that switches the heads of one end of the circuit off, or on again.
  switch(id, found, label) {
    const list = found.map(({ l, h }) => [l, h]);
    const off = list.length > 0 && list.every((head) => isOff(...head));
    byId(id).disabled = !list.length;
    byId(id).onclick = () => setOff(list, !off);
    say(id, `Switch ${off ? "on" : "off"}: ${label(list.map((head) => nameOfHead(...head)).join(", "))}`);
  },
  circuit({ first, induction }, scores) {
    const svg = picture(640, 34 + 30 * Math.max(induction.length, 1), "The circuit: a previous-token head and the induction heads that use it");
    const middle = 16 + (30 * Math.max(induction.length, 1)) / 2;
    induction.forEach(({ l, h, value }, n) => {
      const at = 30 + 30 * n;
      const now = scores[l][h];
      if (first && first.l < l) put(svg, "path", { class: isOff(first.l, first.h) ? "wire cut" : "wire", d: `M208,${middle}C255,${middle} 260,${at} 312,${at}` });
      put(svg, "text", { class: "big", x: 320, y: at + 4 }).text(nameOfHead(l, h));
      put(svg, "rect", { class: "track", x: 366, y: at - 7, width: 130, height: 12, rx: 3 });
      put(svg, "rect", { fill: "var(--role-1)", x: 366, y: at - 7, width: Math.max(130 * now, 0), height: 12, rx: 3 });
      put(svg, "text", { x: 504, y: at + 4 }).text(`${now.toFixed(2)}${Math.abs(now - value) > 0.005 ? ` (was ${value.toFixed(2)})` : ""}`);
    });
    if (first) put(svg, "text", { class: "big", x: 200, "text-anchor": "end", y: middle + 4 }).text(`${nameOfHead(first.l, first.h)} looks one back`);
    if (!induction.length) put(svg, "text", { x: 20, y: 30 }).text("No head of this model passes the threshold 0.4 of induction here.");
    fill("circuit", svg.node());
  },
});

function strongest(run, role, count) {
  const { values } = roleScores(run, idealCells(role, run.ids, current.pieces));
  return values.flatMap((row, l) => row.map((value, h) => [nameOfHead(l, h), value])).sort((a, b) => b[1] - a[1]).slice(0, count).map(([name, value]) => `${name} ${value.toFixed(2)}`).join(", ");
}
claim("prev-token", (run) => strongest(run, "previous-token", 2));
claim("sinks", (run) => strongest(run, "first-token sink", 2));
claim("induction", async () => {
  const own = new Laboratory(lab.period);
  const whole = await own.untouched(CLAIM);
  const { first } = own.circuit(whole);
  const off = noneOff();
  if (first) off[first.l][first.h] = true;
  const without = first && (await own.run(plainOptions(), off, CLAIM));
  return without ? `${whole.second.toFixed(2)} \u2192 ${without.second.toFixed(2)}` : `${whole.second.toFixed(2)}; no such head here`;
});
claim("at-once", async () => (await lossOf({ ids: words.ids(PRESETS[2][1]()) })).toFixed(2));
claim("example-sentence", () => String(words.ids(PRESETS[1][1]()).length - 1));
