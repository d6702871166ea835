// The text of the look by its places.

// The text of a token by its place, or null where the page does not hold it.
function tokenText(place) {
  const cell = look.cells[place];
  if (look.cells.length === look.length) return cell ? cell.text : null;
  return single.get(place) ?? null;
}

const single = new Map(look.tokens); // tokens of a pooled text that stand alone, by place

// A side of a map: `size` cells over `total` places of an axis, which is null where nobody knows what stands there.
function sideOf(size, total, axis) {
  return { size, total: total || look.length, axis: look.axes[axis] ?? null };
}

// What stands at a place: a token, a patch by row and column, a moment of a sound; null where that is not known.
function axisText(place, { axis, total }) {
  if (!axis) return null;
  const patch = patchAt(axis, place);
  if (patch) return `${axis.grids.length > 1 ? `picture ${patch[0]}, ` : ""}r${patch[1]} c${patch[2]}`;
  const own = Object.entries(axis.apart).find(([, places]) => places.includes(place));
  if (own) return own[1].length > 1 ? `${own[0].replace(/s$/, "")} ${own[1].indexOf(place)}` : own[0];
  if (axis.main) return tokenText(place);
  if (axis.names.length) return axis.names[place] ?? null;
  return axis.kind === "sound" && heard?.seconds ? `${number((place * heard.seconds) / total, 2)} s` : null;
}

const heard = look.pictures.find((picture) => picture.kind === "sound");

// Picture, row and column of a place; null where it is no patch.
function patchAt(axis, place) {
  const at = axis.at.slice(3 * place, 3 * place + 3);
  return at.length && at[0] >= 0 ? at : null;
}

function axisName(place, side, limit = 24) {
  const text = axisText(place, side);
  return text === null ? `#${place}` : plainText(text, limit);
}

// Which places a cell of a side stands for. An axis that nothing is known of has positions only.
function cellOf(index, side) {
  const { size, total, axis } = side;
  const start = Math.ceil((index * total) / size);
  const count = Math.ceil(((index + 1) * total) / size) - start;
  if (axis?.main && size === look.cells.length && !patchAt(axis, start)) return look.cells[index];
  return { start, count, text: size === total || axis?.at.length ? axisText(start, side) : null };
}

function cellLabel(index, side, limit) {
  const cell = cellOf(index, side);
  return cell.text === null ? `#${cell.start}` : plainText(cell.text, limit);
}

function cellSentence(index, side) {
  const cell = cellOf(index, side);
  const place = cell.count > 1 ? `${cell.start}\u2013${cell.start + cell.count - 1}` : `${cell.start}`;
  return cell.text === null ? place : `${place} \u201c${plainText(cell.text, 32)}\u201d`;
}
