"use strict";

// The look, as the page holds it. Strings in it are hostile: they reach the document as text nodes, or as attribute
// values that only CSS attr() reads, and in no other way.

const look = JSON.parse(document.getElementById("look").textContent);

const heads = look.heads.layer.map((layer, index) => {
  const head = { index, name: `${layer}.${look.heads.head[index]}` };
  for (const key of Object.keys(look.heads)) head[key] = look.heads[key][index];
  head.rows = look.maps.rows[index];
  head.columns = look.maps.columns[index];
  return head;
});

// What is chosen now; whoever shows it listens.
const state = { head: 0, query: 0, roles: new Set(), shade: "root", statistic: "entropy" };
const listeners = {};

function on(event, listener) {
  (listeners[event] ??= []).push(listener);
}

function emit(event, value) {
  for (const listener of listeners[event] ?? []) listener(value);
}

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

function number(value, digits) {
  return value === null || value === undefined ? "\u2013" : value.toFixed(digits);
}

function plural(count, word) {
  return `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;
}

// One colour a role, from Okabe and Ito's palette for all kinds of colour vision; the name always stands beside it.
function roleColour(role) {
  return role === undefined ? "var(--none)" : `var(--role-${look.roles[role].colour})`;
}

function rolesText(head) {
  return head.roles.map(([role, score]) => `${look.roles[role].name} ${number(score, 2)}`).join(", ");
}

// Roles are joined by "or"; the number of roles stands for "no role".
function matches(head) {
  if (!state.roles.size) return true;
  if (!head.roles.length) return state.roles.has(look.roles.length);
  return head.roles.some(([role]) => state.roles.has(role));
}

function selectHead(index) {
  if (index < 0 || index >= heads.length) return;
  state.head = index;
  state.query = Math.min(state.query, heads[index].rows - 1);
  emit("head", heads[index]);
}

function selectQuery(query) {
  state.query = query;
  emit("query", query);
}
