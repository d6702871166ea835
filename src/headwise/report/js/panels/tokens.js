// The text itself, tinted by what one token attends to, or by who attends to it.

const text = { nodes: [], attends: true, head: -1 };

function buildTokens() {
  const place = byId("tokens");
  look.cells.forEach((cell, index) => {
    const node = el("span", { className: "token", role: "button", tabIndex: -1 });
    appendText(node, cell.text);
    if (cell.full) node.append(el("span", { className: "more", "data-show": `\u2026 (${cell.full.toLocaleString("en")} characters)` }));
    node.addEventListener("pointerenter", () => tint(index));
    node.addEventListener("click", () => overText(heads[state.head]) && selectQuery(index));
    node.addEventListener("focus", () => tint(index));
    text.nodes.push(node);
    place.append(node);
  });
  place.addEventListener("pointerleave", () => tint(state.query));
  place.addEventListener("keydown", moveInText);
  for (const [id, attends] of [["attends", true], ["attended", false]]) {
    byId(id).addEventListener("click", () => {
      text.attends = attends;
      byId("attends").setAttribute("aria-pressed", String(attends));
      byId("attended").setAttribute("aria-pressed", String(!attends));
      tint(state.query);
    });
  }
}

function moveInText(event) {
  const now = text.nodes.indexOf(document.activeElement);
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  if (event.key === "Enter" || event.key === " ") {
    event.preventDefault();
    selectQuery(Math.max(now, 0));
  } else if (step && text.nodes[now + step]) {
    event.preventDefault();
    text.nodes[now + step].focus();
  }
}

// Does this head run over the shown text on both axes? (Cross-attention does not.)
function overText(head) {
  const size = look.cells.length;
  return size > 0 && head.part !== "cross" && head.sides.every((side) => side.axis?.main && side.size === size);
}

function tint(chosen) {
  const head = heads[state.head];
  byId("strongest").replaceChildren();
  byId("strongest-title").textContent = overText(head) ? "" : "This head does not run over this text on both sides.";
  if (!overText(head)) {
    for (const node of text.nodes) node.style.setProperty("--weight", "0%");
    return;
  }
  const weights = text.nodes.map((_, i) => (text.attends ? weightAt(head, chosen, i) : weightAt(head, i, chosen)));
  text.nodes.forEach((node, i) => {
    node.style.setProperty("--weight", `${(100 * Math.sqrt(weights[i])).toFixed(1)}%`);
    node.classList.toggle("strong", weights[i] > 0.45);
    node.classList.toggle("chosen", i === chosen);
    node.setAttribute("aria-pressed", String(i === state.query));
    node.tabIndex = i === state.query ? 0 : -1;
  });
  listStrongest(head, chosen, weights);
}

function listStrongest(head, chosen, weights) {
  const title = byId("strongest-title");
  const of = el("bdi", {}, cellSentence(chosen, head.sides[0]));
  title.replaceChildren(...(text.attends ? ["Query ", of, mapsOf(head) === kept.moved ? " moves most from" : " attends most to"] : ["Key ", of, mapsOf(head) === kept.moved ? " is moved most by" : " is attended most by"]));
  const order = weights.map((_, i) => i).sort((a, b) => weights[b] - weights[a] || a - b);
  for (const i of order.slice(0, 5).filter((j) => weights[j] >= 0.005)) {
    const bar = el("span", { className: "bar-of" });
    bar.style.setProperty("--weight", `${100 * weights[i]}%`);
    const name = el("bdi", {}, cellSentence(i, head.sides[1]));
    byId("strongest").append(el("li", {}, el("span", { className: "who" }, name), bar, el("b", {}, number(weights[i], 2))));
  }
}

// The query that shows a head best: the strongest weight on a key that is not the first, nor the query itself.
function tellingQuery(head) {
  let [best, query] = [-1, head.rows - 1];
  if (head.sides[0].axis?.kind === "text and picture") return Math.max(query, 0); // what the text makes of the picture
  for (let i = Math.floor(head.rows / 3); i < head.rows; i++) {
    for (let j = 1; j < head.columns; j++) {
      if (i !== j && codeAt(head, i, j) > best) [best, query] = [codeAt(head, i, j), i];
    }
  }
  return Math.max(query, 0);
}
