// The table of heads, sorted by any column; long ones are shown a part at a time.

const sorting = { key: "index", down: false, every: false, most: 200 };
const STEP = 200;

function columns() {
  const own = (s) => s.role === null || look.roles[s.role].played > 0 || sorting.every;
  const numbers = look.statistics.map((s, key) => ({ ...s, key })).filter((s) => own(s) && heads.some((head) => head.values[s.key] !== null));
  return [
    { key: "index", label: "head", meaning: "layer.head", show: (head) => head.name, value: (head) => head.index },
    ...numbers.map((s) => ({ ...s, label: plainText(s.label, 30), show: (head) => number(head.values[s.key], s.digits), value: (head) => head.values[s.key] })),
    { key: "roles", label: "roles", meaning: "with their scores", show: rolesText, value: (head) => head.main?.value ?? null },
  ];
}

function buildTable() {
  byId("every").addEventListener("change", (event) => {
    sorting.every = event.target.checked;
    fillTable();
  });
  byId("more-rows").addEventListener("click", () => {
    sorting.most += STEP;
    fillTable();
  });
  byId("table").append(el("thead"), el("tbody"));
  byId("table").tBodies[0].addEventListener("click", (event) => {
    const row = event.target.closest("tr");
    if (!row) return;
    selectHead(Number(row.dataset.head));
    byId("detail").scrollIntoView({ block: "nearest" });
  });
}

function headerOf(column) {
  const button = el("button", { type: "button", title: plainText(column.meaning, 300) }, column.label);
  button.addEventListener("click", () => {
    sorting.down = sorting.key === column.key ? !sorting.down : column.key !== "index";
    sorting.key = column.key;
    fillTable();
    byId("table").querySelector(`th[data-key="${column.key}"] button`).focus();
  });
  const header = el("th", { scope: "col", "data-key": column.key }, button);
  const active = column.key === sorting.key;
  header.setAttribute("aria-sort", active ? (sorting.down ? "descending" : "ascending") : "none");
  return header;
}

function fillTable() {
  const shown = columns();
  const column = shown.find((c) => c.key === sorting.key) ?? shown[0];
  const sign = sorting.down ? -1 : 1;
  const order = heads.filter(matches).sort((a, b) => {
    const [x, y] = [column.value(a), column.value(b)];
    if (x === null || y === null) return (x === null) - (y === null) || a.index - b.index;
    return sign * (x - y) || a.index - b.index;
  });
  byId("table").tHead.replaceChildren(el("tr", {}, ...shown.map(headerOf)));
  byId("table").tBodies[0].replaceChildren(...order.slice(0, sorting.most).map((head) => tableRow(head, shown)));
  byId("more-rows").hidden = order.length <= sorting.most;
  byId("more-rows").textContent = `show ${Math.min(STEP, order.length - sorting.most)} more of ${plural(order.length, "head")}`;
}

function tableRow(head, shown) {
  const row = el("tr", { className: head.index === state.head ? "now" : "" });
  row.dataset.head = head.index;
  for (const column of shown) {
    const cell = el(column.key === "index" ? "th" : "td", { className: column.key });
    if (column.key === "index") {
      const open = el("button", { type: "button" }, head.name);
      open.setAttribute("aria-label", `Open layer ${head.layer}, head ${head.head}`);
      cell.append(open);
    } else if (column.key === "roles") cell.append(...badges(head));
    else cell.textContent = column.show(head);
    row.append(cell);
  }
  return row;
}

function markRow(head) {
  for (const row of byId("table").tBodies[0].rows) row.classList.toggle("now", Number(row.dataset.head) === head.index);
}

function badges(head) {
  return head.roles.map(({ role, value, threshold }) => {
    const { label, plain, formula, source } = look.roles[role];
    const badge = el("span", { className: "badge" }, el("i", {}, signOf(role)), plainText(label, 40), el("b", {}, number(value, 2)));
    badge.style.setProperty("--role", roleColour(role));
    badge.style.setProperty("--on", roleInk(role));
    badge.title = [plain, `score ${number(value, 3)}, threshold ${number(threshold, 2)}`, formula, source].filter(Boolean).map((s) => plainText(s, 300)).join("\n");
    return badge;
  });
}
