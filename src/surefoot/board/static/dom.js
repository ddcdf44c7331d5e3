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

export function toast(text) {
  document.querySelectorAll(".toast").forEach((old) => old.remove());
  const box = h("div.toast", { role: "status" }, text);
  document.body.append(box);
  setTimeout(() => box.remove(), 4000);
}

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
