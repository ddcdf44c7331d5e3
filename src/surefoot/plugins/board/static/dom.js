// Elements from plain values. Text is always text: nothing here parses HTML.
export function h(tag, attributes = {}, ...children) {
  const [name, ...classes] = tag.split(".");
  const element = document.createElement(name || "div");
  if (classes.length) element.className = classes.join(" ");
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key === "style") Object.assign(element.style, value);
    else if (key === "value") element.value = value;
    else if (key === "class") element.className = [element.className, value].filter(Boolean).join(" ");
    else element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.flat(9).filter((c) => c !== null && c !== undefined && c !== false));
  return element;
}

export function replace(element, ...children) {
  element.replaceChildren(...children.flat(9).filter((c) => c !== null && c !== undefined && c !== false));
  return element;
}

// A table that scrolls by itself. A column is its label and the class of its cells.
export const table = (columns, rows, kind = "table") => h("div.scroll", { tabindex: 0 }, h(kind, {},
  columns.some(([label]) => label) ? h("thead", {}, h("tr", {}, columns.map(([label, name]) => h("th", { class: name }, label)))) : null,
  h("tbody", {}, rows.map((cells) => h("tr", {}, cells.map((cell, i) => h("td", { class: columns[i][1] }, cell)))))));

const CONTROLS = "a[href],button,input,select,textarea,[tabindex]";
const isControl = (node) => node instanceof Element && node.matches("a,button,input,select,textarea");
const nameOf = (e) => [e.tagName, e.dataset.key || e.id || e.getAttribute("aria-label") || e.getAttribute("href") || e.textContent].join();

// The same for what changes as time goes by: what looks as before stays, and with it a click that
// has begun, the focus, a selection and a scrolled table. Listeners belong to controls, which are
// replaced where they differ; elsewhere a listener may only use what its element's attributes say.
export function redraw(element, ...children) {
  const focused = element.contains(document.activeElement) ? document.activeElement : null;
  const name = focused && nameOf(focused);
  merge(element, replace(h("div"), ...children));
  if (focused && !focused.isConnected) [...element.querySelectorAll(CONTROLS)].find((e) => nameOf(e) === name)?.focus({ preventScroll: true });
  return element;
}

function merge(old, fresh) {
  const nodes = [...fresh.childNodes];
  nodes.forEach((node, place) => {
    const there = old.childNodes[place];
    if (!there) old.append(node);
    else if (isControl(there) || isControl(node) || there.nodeName !== node.nodeName) { if (!isSame(there, node)) there.replaceWith(node); }
    else if (there.isEqualNode(node) && !node.querySelector?.("input,select,textarea")) return;
    else if (there instanceof Text) there.data = node.data;
    else {
      for (const { name } of [...there.attributes]) if (!node.hasAttribute(name)) there.removeAttribute(name);
      for (const { name, value } of node.attributes) {
        if (name === "style") there.style.cssText = value; // the attribute is forbidden by our Content-Security-Policy
        else if (there.getAttribute(name) !== value) there.setAttribute(name, value);
      }
      merge(there, node);
    }
  });
  while (old.childNodes.length > nodes.length) old.lastChild.remove();
}

// What a person types in the field that is in focus is left alone.
const isSame = (there, node) => there.isEqualNode(node) && there.checked === node.checked && (there.value === node.value || there === document.activeElement);

export function toast(text) {
  document.querySelectorAll(".toast").forEach((old) => old.remove());
  const box = h("div.toast", { role: "status" }, text);
  document.body.append(box);
  setTimeout(() => box.remove(), 4000);
}

// Asks before what cannot be undone; whether it may be done.
export const ask = (text, yes, no) => new Promise((resolve) => {
  const box = h("dialog", { onclose: () => { box.remove(); resolve(box.returnValue === "yes"); } }, h("p", {}, text),
    h("div.row", {}, h("button", { onclick: () => box.close() }, no), h("button.danger", { onclick: () => box.close("yes") }, yes)));
  document.body.append(box);
  box.showModal();
});

export function later(milliseconds, call) {
  let timer;
  const delayed = (...values) => {
    clearTimeout(timer);
    timer = setTimeout(() => call(...values), milliseconds);
  };
  delayed.cancel = () => clearTimeout(timer);
  return delayed;
}

// Text of our own documentation, in which `backticks` are code.
export const marked = (text) => (text || "").split("`").map((part, i) => (i % 2 ? h("code", {}, part) : part));
