"use strict";

// Elements of the document, and numbers as they are written.

function byId(id) {
  return document.getElementById(id);
}

// An element with properties and children; strings among the children become text nodes.
function el(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-") || name === "role" || name === "scope") node.setAttribute(name, value);
    else node[name] = value;
  }
  node.append(...children);
  return node;
}

// So many digits after the point; null stands for three digits in all.
function number(value, digits) {
  if (value === null || value === undefined) return "\u2013";
  return digits === null ? String(Number(value.toPrecision(3))) : value.toFixed(digits).replace(/^-(?=0(\.0*)?$)/, "");
}

function plural(count, word) {
  return `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;
}

// What was deflated and written as base64 text.
async function inflate(base64) {
  const packed = Uint8Array.fromBase64 ? Uint8Array.fromBase64(base64) : Uint8Array.from(atob(base64), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}
