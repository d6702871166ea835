// Two charts: one number of every head by layer; one head's mass by distance.

function buildStatistics() {
  const select = byId("statistic");
  look.statistics.forEach((statistic, i) => {
    if (heads.some((head) => head.values[i] !== null)) select.append(el("option", { value: i }, plainText(statistic.label, 40)));
  });
  select.value = state.statistic;
  select.addEventListener("change", () => {
    state.statistic = Number(select.value);
    drawChart();
  });
}

function drawChart() {
  const place = byId("chart");
  const statistic = look.statistics[state.statistic];
  byId("meaning").textContent = plainText(statistic.meaning, 300);
  const width = Math.max(place.clientWidth, 260);
  const [height, left, bottom] = [190, 42, 34];
  const layers = [...new Set(heads.map((head) => head.layer))];
  const x = d3.scaleBand(layers, [left, width - 6]).paddingInner(0.12);
  const values = heads.map((head) => head.values[state.statistic]).filter((value) => value !== null);
  const highest = Math.max(0, ...values);
  const y = d3.scaleLinear([0, highest || 1], [height - bottom, 10]).nice(4);
  const svg = drawing(width, height).attr("aria-hidden", "true");
  const every = Math.ceil(layers.length / (width / 26));
  svg.append("g").attr("class", "grid").attr("transform", `translate(${left},0)`).call(d3.axisLeft(y).ticks(4).tickSize(left + 6 - width));
  svg.append("g").attr("transform", `translate(0,${height - bottom})`).call(d3.axisBottom(x).tickSize(0).tickPadding(7).tickValues(layers.filter((_, i) => i % every === 0)));
  svg.append("text").attr("class", "name").attr("x", width - 6).attr("y", height - 3).attr("text-anchor", "end").text("layer");
  const most = Math.max(1, ...heads.map((head) => head.head + 1));
  const radius = Math.max(2.5, Math.min(5, x.bandwidth() / most / 1.6));
  for (const head of heads) {
    if (head.values[state.statistic] === null) continue;
    const dot = svg.append("circle").attr("r", radius).attr("cy", y(head.values[state.statistic]));
    dot.attr("cx", x(head.layer) + ((head.head + 0.5) / most) * x.bandwidth());
    dot.classed("dot", true).classed("off", !matches(head)).classed("now", head.index === state.head);
    dot.style("--role", roleColour(head.main?.role)).attr("data-head", head.index);
  }
  svg.on("click", (event) => event.target.dataset.head && selectHead(Number(event.target.dataset.head)));
  svg.on("pointerover", (event) => nameDot(event.target, statistic));
  place.replaceChildren(svg.node());
}

// Its name is made when it is wanted: there may be thousands.
function nameDot(node, statistic) {
  if (!node.dataset.head || node.firstChild) return;
  const head = heads[Number(node.dataset.head)];
  d3.select(node).append("title").text(`${head.name}: ${number(head.values[state.statistic], statistic.digits)} ${plainText(rolesText(head), 200)}`);
}

function filterDots() {
  for (const dot of byId("chart").querySelectorAll(".dot")) dot.classList.toggle("off", !matches(heads[Number(dot.dataset.head)]));
}

function markDot(head) {
  byId("chart").querySelector(".dot.now")?.classList.remove("now");
  byId("chart").querySelector(`.dot[data-head="${head.index}"]`)?.classList.add("now");
}

function drawOffsets(head) {
  const place = byId("offsets");
  const why = head.part === "cross" ? "Not measured: queries and keys are of two texts." : "Not in this report: there are too many heads.";
  byId("offsets-of").textContent = head.offsets.length ? `head ${head.name}: mean over the queries; keys further than ${head.offsets.length - 1} positions away are not drawn` : "";
  if (!head.offsets.length) return place.replaceChildren(el("p", { className: "hint" }, why));
  const width = Math.max(place.clientWidth, 200);
  const [height, left, bottom] = [190, 42, 34];
  // Key minus query, from furthest back to furthest ahead; nothing lies ahead where no query may look there.
  const masses = [...head.offsets.map((mass, i) => [-i, mass]).reverse(), ...head.ahead.map((mass, i) => [i + 1, mass])];
  const name = (place) => (place > 0 ? `+${place}` : place < 0 ? `\u2212${-place}` : "0");
  const x = d3.scaleBand(masses.map(([place]) => place), [left, width - 4]).padding(0.25);
  const highest = Math.max(0, ...masses.map(([, mass]) => mass));
  const y = d3.scaleLinear([0, Math.max(highest, 0.1)], [height - bottom, 8]).nice(3);
  const svg = drawing(width, height).attr("role", "img");
  svg.attr("aria-label", masses.map(([place, mass]) => `${name(place)}: ${number(mass, 2)}`).join(", "));
  svg.append("g").attr("class", "grid").attr("transform", `translate(${left},0)`).call(d3.axisLeft(y).ticks(3).tickSize(left + 4 - width));
  svg.append("g").attr("transform", `translate(0,${height - bottom})`).call(d3.axisBottom(x).tickSize(0).tickPadding(6).tickFormat(name));
  svg.append("text").attr("class", "name").attr("x", width - 4).attr("y", height - 3).attr("text-anchor", "end").text("key position minus query position");
  for (const [place, mass] of masses) {
    if (mass === null) continue;
    const bar = svg.append("rect").attr("class", "mass").attr("x", x(place)).attr("width", x.bandwidth());
    bar.attr("y", y(mass)).attr("height", Math.max(0, y(0) - y(mass))).append("title").text(number(mass, 3));
  }
  place.replaceChildren(svg.node());
}
