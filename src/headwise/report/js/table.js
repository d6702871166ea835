// The table of heads, sorted by any column.

const sorting = { key: "index", down: false };

function columns() {
  const numbers = look.statistics.map((s, key) => ({ ...s, key })).filter(({ key }) => heads.some((head) => head.values[key] !== null));
  return [
    { key: "index", label: "head", meaning: "layer.head", show: (head) => head.name, value: (head) => head.index },
    ...numbers.map((s) => ({ ...s, label: plainText(s.label, 30), show: (head) => number(head.values[s.key], s.digits), value: (head) => head.values[s.key] })),
    { key: "roles", label: "roles", meaning: "with their scores", show: rolesText, value: (head) => head.roles[0]?.value ?? null },
  ];
}

function buildTable() {
  const header = el("tr");
  for (const column of columns()) {
    const button = el("button", { type: "button", title: plainText(column.meaning, 300) }, column.label);
    button.addEventListener("click", () => {
      sorting.down = sorting.key === column.key ? !sorting.down : column.key !== "index";
      sorting.key = column.key;
      fillTable();
    });
    header.append(el("th", { scope: "col", "data-key": column.key }, button));
  }
  byId("table").append(el("thead", {}, header), el("tbody"));
  fillTable();
}

function fillTable() {
  const shown = columns();
  const column = shown.find((c) => c.key === sorting.key);
  const sign = sorting.down ? -1 : 1;
  const order = heads.filter(matches).sort((a, b) => {
    const [x, y] = [column.value(a), column.value(b)];
    if (x === null || y === null) return (x === null) - (y === null) || a.index - b.index;
    return sign * (x - y) || a.index - b.index;
  });
  for (const th of byId("table").tHead.rows[0].cells) {
    const active = th.dataset.key === String(sorting.key);
    th.setAttribute("aria-sort", active ? (sorting.down ? "descending" : "ascending") : "none");
  }
  byId("table").tBodies[0].replaceChildren(...order.map((head) => tableRow(head, shown)));
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
  row.addEventListener("click", () => {
    selectHead(head.index);
    byId("detail").scrollIntoView({ block: "nearest" });
  });
  return row;
}

function badges(head) {
  return head.roles.map(({ role, value, threshold }) => {
    const { label, formula, source } = look.roles[role];
    const badge = el("span", { className: "badge" }, el("i"), plainText(label, 40), el("b", {}, number(value, 2)));
    badge.style.setProperty("--role", roleColour(role));
    badge.title = [`score ${number(value, 3)}, threshold ${number(threshold, 2)}`, formula, source].filter(Boolean).map((s) => plainText(s, 300)).join("\n");
    return badge;
  });
}
