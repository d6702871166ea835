// 5. All heads at once, with the cells outlined where an ideal head of a role would look.

let roleShown = "previous-token";

section("grid", {
  build() {
    headGrid(byId("maps"), "All heads. Arrow keys move.", { make: (cell) => cell.append(el("canvas", {}), el("span", { className: "says" })) });
    fill("grid-role", ...chapter.roles.map(({ name }) => el("option", { value: name }, name)));
    byId("grid-role").value = roleShown;
    byId("grid-role").onchange = (event) => {
      roleShown = event.target.value;
      if (current) this.draw(current);
    };
    const large = byId("large-map");
    large.onpointermove = (event) => this.point(event, false);
    large.onclick = (event) => this.point(event, true);
    byId("large").onkeydown = (event) => {
      const step = { ArrowUp: -1, ArrowDown: 1 }[event.key];
      if (!step || event.target !== byId("large")) return;
      event.preventDefault();
      lookAt({ query: state.query + step });
    };
  },
  point(event, keep) {
    const box = event.target.getBoundingClientRect();
    const T = current.ids.length;
    const place = (at, size) => Math.min(Math.max(Math.floor((at / size) * T), 0), T - 1);
    const [i, j] = [place(event.clientY - box.top, box.height), place(event.clientX - box.left, box.width)];
    if (keep) lookAt({ query: i });
    this.said(current, i, j);
  },
  said(run, i, j) {
    const allowed = j <= i || !state.causal;
    fill("large-said", `Query `, el("bdi", {}, tokenLabel(i)), `, key `, el("bdi", {}, tokenLabel(j)), ": ", el("b", {}, allowed ? `weight ${weightOf(run.now, state.layer, state.head, i, j).toFixed(3)}` : "not allowed"));
  },
  draw(run) {
    const role = chapter.roles.find(({ name }) => name === roleShown);
    const { values, chance, queries } = roleScores(run.now, idealCells(role.name, run.ids, run.pieces));
    const plays = rolesPlayed(run.now, run.pieces);
    for (const cell of byId("maps").querySelectorAll(".head")) {
      const [l, h] = placeOf(cell.dataset.item);
      drawHead(cell.querySelector("canvas"), run.now, l, h);
      const mine = queries > 0 && playsRole(role, values[l][h], chance);
      cell.classList.toggle("plays", mine);
      cell.classList.toggle("off", isOff(l, h));
      cell.style.setProperty("--role", `var(--role-${role.colour})`);
      const others = plays[l][h].map((one) => one.role.letter).join("");
      cell.querySelector(".says").textContent = `${nameOfHead(l, h)} ${queries ? values[l][h].toFixed(2) : ""} ${others}`;
      cell.setAttribute("aria-label", `head ${nameOfHead(l, h)}: ${role.name} ${queries ? values[l][h].toFixed(2) : "cannot be measured"}${mine ? ", plays it" : ""}${isOff(l, h) ? ", off" : ""}`);
    }
    say("grid-said", queries ? `${role.name}: look for ${role.look}. A head plays the role above ${role.threshold} and twice what even attention would give, ${chance.toFixed(3)}. Queries of this text that can show it: ${queries}.` : `${role.name}: nothing in this text can show it.`);
    fill("grid-numbers", numbersOf(["layer", ...range(model.H, (h) => `head ${h}`)], values.map((row, l) => [String(l), ...row.map((value) => value.toFixed(3))]), `${role.name}, all heads`));
    this.look(run);
  },
  look(run) {
    markHead(byId("maps"));
    const T = run.ids.length;
    drawHead(byId("large-map"), run.now, state.layer, state.head);
    say("large-title", `Head ${nameOfHead(state.layer, state.head)}${isOff(state.layer, state.head) ? " (off)" : ""}`);
    const cells = idealCells(roleShown, run.ids, run.pieces);
    const svg = drawing("100%", "100%").attr("viewBox", `0 0 ${T} ${T}`).attr("preserveAspectRatio", "none").attr("class", "ideal").attr("aria-hidden", "true");
    cells.forEach((keys, i) => keys.forEach((j) => put(svg, "rect", { x: j, y: i, width: 1, height: 1 })));
    put(svg, "rect", { class: "query", x: 0, y: state.query, width: T, height: 1 });
    fill("large-over", svg.node());
    this.said(run, state.query, strongestKeys(run, 1)[0]);
    tokenBoxes(byId("row-tokens"), (t) => {
      const weight = t <= state.query || !state.causal ? weightOf(run.now, state.layer, state.head, state.query, t) : 0;
      return { share: weight, title: `weight ${weight.toFixed(3)}` };
    }, (t) => lookAt({ query: t }));
  },
});

claim("specialise", (run) => `${rolesPlayed(run, current.pieces).flat().filter((list) => list.length).length} of ${model.L * model.H}`);
claim("interpretable", (run) => `${rolesPlayed(run, current.pieces).flat().filter((list) => !list.length).length} of ${model.L * model.H}`);
claim("heads-not-layers", () => `${model.L} \u00d7 ${model.H} = ${model.L * model.H}`);
