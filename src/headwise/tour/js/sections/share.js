// 11. Fewer key-value heads: the plain mean, live, beside what a fit and training reach.

let shared = null; // losses of the text by key-value heads: { key, rows: [[kv, loss]] }

section("share", {
  build() {
    const all = model.sharings();
    byId("kv").max = String(all.length - 1);
    byId("kv").oninput = (event) => change({ kv: all[Number(event.target.value)] });
    shared = null;
    fill("share-cards", tableOf(["model", "heads", "key-value heads", "group", "d_k", "cache, bytes a token"], chapter.cards.map((card) => [card.name, String(card.heads), card.group === null ? "latent" : String(card.kv), card.group === null ? "\u2013" : String(card.group), String(card.d_k), thousands(card.cache)])));
  },
  async draw(run) {
    const all = model.sharings();
    byId("kv").value = String(all.indexOf(state.kv));
    say("kv-said", `${WORDS.keyValueHeads(state.kv)}: ${thousands(cacheBytes(state.kv))} bytes a token, loss ${run.now.loss.toFixed(2)}`);
    byId("kv").setAttribute("aria-valuetext", byId("kv-said").textContent);
    fill("kv-groups", ...range(state.kv, (g) => el("span", {}, `k, v ${g}: heads ${range(model.H, (h) => h).filter((h) => Math.floor((h * state.kv) / model.H) === g).join(" ")}`)));
    const key = run.ids.join();
    if (shared?.key !== key) {
      const rows = [];
      for (const kv of all) {
        rows.push([kv, kv === model.K ? run.plain.loss : await lossOf(run.plain, { kv }, FIGURE)]);
        if (current !== run) return;
      }
      shared = { key, rows };
    }
    const lines = [{ name: "this text: plain mean, computed here", colour: 1, points: shared.rows.map(([kv, loss]) => [String(kv), Number(loss.toFixed(3))]) }];
    if (chapter.packaged) {
      const { original, rows } = chapter.regroup;
      rows.forEach(({ label, losses: by }, n) => lines.push({ name: `held-out text: ${label}`, colour: [5, 0, 2, 3][n], points: all.map((kv) => [String(kv), kv === model.K ? original : (by[kv] ?? null)]) }));
    }
    const most = Math.max(6, ...shared.rows.map(([, loss]) => loss));
    fill("share-chart", keyOf(lines), lineChart({ lines, x: { log: true, values: all.map(String) }, y: [Math.min(1, ...shared.rows.map(([, loss]) => loss)), most], label: "Loss by number of key-value heads", xName: "key-value heads", yName: "loss, nats a token" }), numbersOf(["method", ...all.map(String)], lines.map(({ name, points }) => [name, ...all.map((kv) => String(points.find(([at]) => at === String(kv))?.[1] ?? "\u2013"))])));
  },
});

claim("mqa-gqa", () => model.sharings().map((kv) => thousands(cacheBytes(kv))).join(" "));
claim("quality", async (run) => {
  const out = [];
  for (const kv of model.sharings().slice(1)) {
    out.push((await lossOf(run, { kv })).toFixed(2));
  }
  return `${run.loss.toFixed(2)} \u2192 ${out.join(" ") || "it has one key-value head"}`;
});
claim("card-terms", () => `${model.H}, ${model.width}, ${model.K}, head_dim ${model.D}`);
