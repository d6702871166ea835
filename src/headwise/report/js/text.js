// Token text: shown so that nothing in it acts, and nothing in it hides.

// Unicode category C (controls, bidi marks, zero-width, surrogates, unassigned), and the two line separators.
const ACTING = /[\p{C}\u2028\u2029]/u;

const NAMES = { "\n": "\u23ce", "\t": "\u21e5", "\r": "\u240d" };

function nameOf(character) {
  const code = character.codePointAt(0);
  if (NAMES[character]) return NAMES[character];
  if (code < 32) return String.fromCodePoint(0x2400 + code);
  return `U+${code.toString(16).toUpperCase().padStart(4, "0")}`;
}

// For axes and sentences: one line, every acting character named, the outer spaces marked.
function plainText(text, limit = 24) {
  const characters = [...text.slice(0, 4 * limit)];
  let shown = characters.slice(0, limit).map((c) => (ACTING.test(c) ? nameOf(c) : c)).join("");
  shown = shown.replace(/^ +| +$/g, (spaces) => "\u00b7".repeat(spaces.length));
  if (/^\p{M}/u.test(shown)) shown = `\u25cc${shown}`; // a lone accent needs something to sit on
  return characters.length > limit ? `${shown}\u2026` : shown;
}

// For the running text: the node's textContent is the token itself, to the letter; what acts is wrapped where it can do
// no harm (its own bidi isolate, no width) and named by CSS.
function appendText(node, text) {
  let run = "";
  const flush = () => {
    if (run) node.append(run);
    run = "";
  };
  for (const character of text) {
    if (ACTING.test(character)) {
      flush();
      node.append(el("span", { className: character === "\n" ? "line" : "acting", "data-show": nameOf(character) }, character));
    } else run += character;
  }
  flush();
}

// The text of a token by its place, or null where the page does not hold it.
function tokenText(place) {
  const cell = look.cells[place];
  if (look.cells.length === look.length) return cell ? cell.text : null;
  return single.get(place) ?? null;
}

const single = new Map(look.tokens); // tokens of a pooled text that stand alone, by place

// The same on an axis of so many places: the text itself, or the text behind a start token, as a decoder reads what its
// encoder reads.
function axisText(place, total) {
  if ((total || look.length) === look.length) return tokenText(place);
  if (look.kind !== "encoder-decoder" || total !== look.length - 1) return null;
  return place ? tokenText(place - 1) : "(start)";
}

function axisName(place, total, limit = 24) {
  const text = axisText(place, total);
  return text === null ? `#${place}` : plainText(text, limit);
}

// Which tokens a cell of an axis stands for. An axis that does not run over the text has positions only.
function cellOf(index, size, total) {
  if (size === look.cells.length && (total || look.length) === look.length) return look.cells[index];
  const start = Math.ceil((index * total) / size);
  return { start, count: Math.ceil(((index + 1) * total) / size) - start, text: size === total ? axisText(index, total) : null };
}

function cellLabel(index, size, total, limit) {
  const cell = cellOf(index, size, total);
  return cell.text === null ? `#${cell.start}` : plainText(cell.text, limit);
}

function cellSentence(index, size, total) {
  const cell = cellOf(index, size, total);
  const place = cell.count > 1 ? `${cell.start}\u2013${cell.start + cell.count - 1}` : `${cell.start}`;
  return cell.text === null ? place : `${place} \u201c${plainText(cell.text, 32)}\u201d`;
}
