// 6. Heads switched off: what it costs, which tokens it costs, and a game of few heads.

let prices = null; // { key, costs }: what each head costs on the text and in the state it was priced in

const priceKey = (run) => JSON.stringify([run.ids, run.options, run.off]);

// A switch shows at once that it is pressed; the loss follows.
function showSwitches() {
  for (const [l, h] of heads()) setPressed(byId("switches").querySelector(`[data-item="${nameOfHead(l, h)}"]`), !isOff(l, h));
}
on("change", showSwitches);

section("off", {
  build() {
    headGrid(byId("switches"), "All heads as switches. Arrow keys move, Enter or x switches a head off and on.", {
      make: (cell, l, h) => cell.append(el("b", {}, nameOfHead(l, h)), el("span", { className: "cost" }, "\u00a0")),
      press: toggleHead,
    });
    byId("off-all").onclick = () => setOff(heads());
    byId("off-one").onclick = () => this.dearest();
    byId("off-none").onclick = () => setOff(heads(), false);
    byId("off-best").onclick = () => setOff([[2, 1]].filter(([l, h]) => l < model.L && h < model.H));
    byId("price").onclick = () => this.price();
    prices = null;
  },
  // Leaves the dearest head of each layer on, by the prices last computed.
  dearest() {
    if (!prices) return;
    const best = prices.costs.map((row) => row.indexOf(Math.max(...row)));
    change({ off: prices.costs.map((row, l) => row.map((_, h) => h !== best[l])) });
  },
  async price() {
    if (!current) return;
    const run = current.now;
    byId("price").disabled = true;
    const costs = range(model.L, () => []);
    await work(FIGURE, () => session.priceAll(run, (l, h, cost) => {
      costs[l][h] = cost;
      const cell = byId("switches").querySelector(`[data-item="${nameOfHead(l, h)}"] .cost`);
      if (current.now === run) cell.textContent = isOff(l, h) ? "off" : signed(cost);
    }, FIGURE));
    byId("price").disabled = false;
    prices = { key: priceKey(run), costs };
    if (current) this.draw(current);
  },
  draw(run) {
    const known = prices?.key === priceKey(run.now) ? prices.costs : null;
    byId("price-old").hidden = !prices || Boolean(known);
    showSwitches();
    const most = known ? largest(known.flat()) : 1;
    for (const cell of byId("switches").querySelectorAll(".head")) {
      const [l, h] = placeOf(cell.dataset.item);
      cell.setAttribute("aria-label", `head ${nameOfHead(l, h)}, ${isOff(l, h) ? "off" : "on"}${known ? `, costs ${signed(known[l][h])}` : ""}`);
      cell.querySelector(".cost").textContent = isOff(l, h) ? "off" : known ? signed(known[l][h]) : "\u00a0";
      cell.style.setProperty("--share", known ? `${((80 * Math.abs(known[l][h])) / most).toFixed(0)}%` : "0%");
      cell.classList.toggle("less", Boolean(known && known[l][h] < 0));
    }
    const left = heads().filter(([l, h]) => !isOff(l, h)).length;
    say("off-said", `${left} of ${model.L * model.H} heads are on. Loss ${run.now.loss.toFixed(3)}${chapter.packaged && left < model.L * model.H ? (run.now.loss < 2 ? ": below 2.0. With how few heads can you stay there?" : ": not below 2.0.") : "."}`);
    this.harder(run);
    markHead(byId("switches"));
  },
  look() {
    markHead(byId("switches"));
  },
  harder(run) {
    const more = run.now.each.map((value, t) => value - run.plain.each[t]);
    say("harder-said", changes().length ? "What became harder (orange) or easier (blue) to predict:" : "Switch a head off: the tokens that become harder to predict turn orange.");
    tokenBoxes(byId("harder"), (t) => {
      const value = t ? more[t - 1] : 0;
      return { share: Math.abs(value) / 6, less: value < 0, title: t ? `${signed(value, 2)} nats` : "the beginning" };
    }, (t) => lookAt({ query: t }));
    const worst = more.map((value, t) => [t + 1, value]).filter(([, value]) => value > 0.05).sort((a, b) => b[1] - a[1]).slice(0, 5);
    fill("harder-list", ...(worst.length ? [barList(worst.map(([t, value]) => [tokenLabel(t, 12), value, signed(value, 2)]))] : []));
  },
});

claim("redundant", async (run) => {
  const costs = range(model.L, () => []);
  await plainSession.priceAll(run, (l, h, cost) => (costs[l][h] = cost), CLAIM);
  if (current.plain === run && prices?.key !== priceKey(current.now)) {  // prices of the setting shown stay
    prices = { key: priceKey(run), costs };
    sections.get("off").draw(current);
  }
  return `${costs.flat().filter((cost) => cost < 0).length} of ${costs.flat().length}`;
});
claim("not-moe", () => {
  const { width, H, K, D, inner } = model;
  return `${thousands(2 * width * (H + K) * D)} and ${thousands(3 * width * inner)}`;
});
