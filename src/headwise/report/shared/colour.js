// Colours of weights, and a place to draw.

// 256 colours; the lightness of viridis rises evenly, for every kind of colour vision and in grey print.
const RAMP = Uint8ClampedArray.from(
  Array.from({ length: 256 }, (_, i) => {
    const rgb = d3.interpolateViridis(i / 255);
    return [1, 3, 5].map((at) => parseInt(rgb.slice(at, at + 2), 16));
  }).flat(),
);

// Keeps the higher of two colours that fall on one pixel: viridis rises in green all the way.
function paint(pixels, at, colour) {
  if (pixels[at + 3] && pixels[at + 1] > RAMP[3 * colour + 1]) return;
  pixels.set(RAMP.subarray(3 * colour, 3 * colour + 3), at);
  pixels[at + 3] = 255;
}

function drawing(width, height) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  return d3.select(node).attr("width", width).attr("height", height);
}
