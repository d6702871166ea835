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
    byId("lab-first").onclick = () => this.first && setOff([[this.first.l, this.first.h]], !isOff(this.first.l, this.first.h));
    byId("lab-second").onclick = () => this.second?.length && setOff(this.second.map(({ l, h }) => [l, h]), !this.second.every(({ l, h }) => isOff(l, h)));
    const curve = chapter.formation;
    byId("formation").hidden = !curve.length;
    if (curve.length) {
      const lines = [{ name: "best previous-token head", colour: 0, points: curve.map(([step, , previous]) => [step, previous]) }, { name: "best induction head", colour: 1, points: curve.map(([step, , , induction]) => [step, induction]) }];
      byId("formation-chart").replaceChildren(keyOf(lines), lineChart({ lines, x: { range: [0, curve.at(-1)[0]] }, y: [0, 1], label: "Scores of the best heads by training step", xName: "training step", yName: "score" }), numbersOf(["step", "held-out loss", "previous-token", "induction"], curve.map((row) => row.map(String))));
    }
  },
  async draw(run) {
    byId("lab-period-said").textContent = String(lab.period);
    const here = lab;
    const whole = await here.untouched(FIGURE);
    const now = whole && (await here.run(optionsNow(), state.off, FIGURE));
    if (!now || here !== lab || current !== run) return; // a newer drawing has begun
    const [scores, circuit] = [here.induction(now), here.circuit(whole)];
    [this.first, this.second] = [circuit.first, circuit.induction];
    byId("lab-period").setAttribute("aria-valuetext", `${lab.period} tokens, then the same again`);
    const svg = picture(640, 170, `Loss of each token: first copy ${now.first.toFixed(2)}, second copy ${now.second.toFixed(2)} nats`);
    const [from, wide] = [34, 600 / now.each.length];
    const y = d3.scaleLinear([0, 15], [150, 8]);
    svg.append("g").attr("class", "grid").attr("transform", `translate(${from},0)`).call(d3.axisLeft(y).ticks(4).tickSize(from - 634));
    now.each.forEach((value, t) => svg.append("rect").attr("class", t < lab.period ? "mass" : "second").attr("x", from + t * wide).attr("width", Math.max(wide - 1, 0.5)).attr("y", y(Math.min(value, 15))).attr("height", 150 - y(Math.min(value, 15))).append("title").text(`token ${t + 1}: ${value.toFixed(2)} nats`));
    svg.append("text").attr("class", "name").attr("x", from + 4).attr("y", 166).text("first copy");
    svg.append("text").attr("class", "name").attr("x", from + lab.period * wide + 4).attr("y", 166).text("second copy");
    byId("lab-chart").replaceChildren(svg.node());
    byId("lab-said").textContent = `Loss of the first copy ${now.first.toFixed(2)}, of the second ${now.second.toFixed(2)} nats a token.${changes().length ? ` Untouched: ${whole.first.toFixed(2)} and ${whole.second.toFixed(2)}.` : ""}`;
    this.circuit(circuit, scores);
    const name = ({ l, h }) => nameOfHead(l, h);
    byId("lab-first").disabled = !circuit.first;
    byId("lab-first").textContent = circuit.first ? `${isOff(circuit.first.l, circuit.first.h) ? "on" : "off"}: ${name(circuit.first)}, which looks one back` : "no head looks one back";
    byId("lab-second").disabled = !circuit.induction.length;
    byId("lab-second").textContent = `${circuit.induction.length && circuit.induction.every(({ l, h }) => isOff(l, h)) ? "on" : "off"}: the induction heads (${circuit.induction.map(name).join(", ") || "none"})`;
  },
  circuit({ first, induction }, scores) {
    const svg = picture(560, 34 + 30 * Math.max(induction.length, 1), "The circuit: a previous-token head feeds the induction heads");
    const middle = 16 + (30 * Math.max(induction.length, 1)) / 2;
    induction.forEach(({ l, h, value }, n) => {
      const at = 30 + 30 * n;
      const now = scores[l][h];
      if (first && first.l < l) svg.append("path").attr("class", isOff(first.l, first.h) ? "wire cut" : "wire").attr("d", `M188,${middle}C235,${middle} 240,${at} 292,${at}`);
      svg.append("text").attr("class", "big").attr("x", 300).attr("y", at + 4).text(nameOfHead(l, h));
      svg.append("rect").attr("class", "track").attr("x", 340).attr("y", at - 7).attr("width", 150).attr("height", 12).attr("rx", 3);
      svg.append("rect").attr("fill", "var(--role-1)").attr("x", 340).attr("y", at - 7).attr("width", Math.max(150 * now, 0)).attr("height", 12).attr("rx", 3);
      svg.append("text").attr("x", 498).attr("y", at + 4).text(`${now.toFixed(2)}${Math.abs(now - value) > 0.005 ? ` (was ${value.toFixed(2)})` : ""}`);
    });
    if (first) svg.append("text").attr("class", "big").attr("x", 180).attr("text-anchor", "end").attr("y", middle + 4).text(`${nameOfHead(first.l, first.h)} looks one back`);
    if (!induction.length) svg.append("text").attr("x", 20).attr("y", 30).text("No head of this model passes the threshold 0.4 of induction here.");
    byId("circuit").replaceChildren(svg.node());
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
  const without = first && (await own.run(plainOptions(), offAll([[first.l, first.h]]), CLAIM));
  return without ? `${whole.second.toFixed(2)} \u2192 ${without.second.toFixed(2)}` : `${whole.second.toFixed(2)}; no such head here`;
});
claim("at-once", async () => (await lossOf({ ids: words.ids(PRESETS[2][1]()) })).toFixed(2));
claim("example-sentence", () => String(words.ids(PRESETS[1][1]()).length - 1));
