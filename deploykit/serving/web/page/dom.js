// Elements by DOM calls alone: text stays text, and the page needs no inline script or style.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) node.setAttribute(name, "");
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

export const byId = (id) => document.getElementById(id);
export const el = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
export const svg = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

/** Replace what a node holds, but only if it changes: a reader's selection and focus remain. */
export function show(node, ...children) {
  const next = el("div", {}, ...children);
  if (next.innerHTML !== node.innerHTML) node.replaceChildren(...next.childNodes);
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** SVG text from charts.js as an element. */
export const graphic = (text) => new DOMParser().parseFromString(text, "image/svg+xml").documentElement;

export const empty = (text) => el("p", { class: "empty" }, text);

/** A bar of which `share` (0 to 1) is filled; the text next to it has the same value. */
export function meter(share) {
  const bar = el("div");
  bar.style.width = `${(100 * Math.min(1, Math.max(0, share || 0))).toFixed(1)}%`;
  return el("div", { class: "meter", "aria-hidden": "true" }, bar);
}
