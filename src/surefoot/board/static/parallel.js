// Parallel coordinates: one axis for each setting and one for the result, one line for each trial.
// Axes stand side by side, or on a phone one below the other.
import { h, replace } from "./dom.js";
import { number } from "./format.js";
import { t } from "./i18n.js";

const SVG = "http://www.w3.org/2000/svg";
const NARROW = 620;
const MAX_TICKS = 6;

function s(name, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else element.setAttribute(key, value);
  }
  element.append(...children.flat(9).filter((c) => c !== null && c !== undefined));
  return element;
}

const text = (value) => (typeof value === "number" ? number(value, 3) : typeof value === "string" ? value : JSON.stringify(value));
const short = (word, most) => (word.length > most ? `…${word.slice(1 - most)}` : word);

// The place of a value between 0 and 1, and the values to write beside the axis.
export function axis(key) {
  if (key.choices) {
    const words = key.choices.map((one) => JSON.stringify(one));
    const count = Math.max(1, words.length - 1);
    const place = (value) => { const at = words.indexOf(JSON.stringify(value)); return at < 0 ? null : words.length === 1 ? 0.5 : at / count; };
    const each = Math.ceil(words.length / MAX_TICKS);
    return { name: key.key, place, ticks: key.choices.filter((_, i) => i % each === 0).map((one) => [place(one), text(one)]) };
  }
  const scale = key.log ? Math.log : (v) => v;
  const [low, high] = [scale(key.low), scale(key.high)];
  const place = (value) => (typeof value === "number" ? (high > low ? (scale(value) - low) / (high - low) : 0.5) : null);
  return { name: key.key, place, ticks: [[0, text(key.low)], [1, text(key.high)]] };
}

function resultAxis(found) {
  const values = found.trials.map((one) => one.value).filter((v) => v !== null);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  return { ...axis({ key: found.row.objective.metric, low, high }), isResult: true };
}

export class Parallel {
  // `chosen` is called with a trial that was clicked, `pointed` with the one under the pointer.
  constructor(chosen, pointed) {
    Object.assign(this, { chosen, pointed, found: null, paths: new Map() });
    this.box = h("div.parallel");
    this.element = h("section.panel", { hidden: true }, h("h2", {}, t("Parallel coordinates")), this.box, h("p.soft.small", {}, t("One line is one trial; the better its result, the stronger its color. Pruned trials are dashed.")));
    this.width = 0;
    this.watcher = new ResizeObserver(() => { if (this.found && Math.abs(this.box.clientWidth - this.width) > 1) this.draw(this.found); });
    this.watcher.observe(this.box);
  }

  draw(found) {
    this.found = found;
    const trials = found.trials.filter((one) => one.value !== null && one.value !== undefined);
    this.element.hidden = !trials.length || !found.keys.length;
    this.paths.clear();
    if (this.element.hidden) { replace(this.box); return; }
    this.width = this.box.clientWidth || 800;
    const axes = [...found.keys.map(axis), resultAxis(found)];
    const isNarrow = this.width < NARROW;
    const height = isNarrow ? 64 * axes.length + 16 : 300;
    const at = isNarrow ? (i, v) => [14 + v * (this.width - 28), 34 + i * 64]
      : (i, v) => [56 + (i * (this.width - 112)) / Math.max(1, axes.length - 1), 258 - v * 212];
    const sign = found.row.objective.direction === "maximize" ? -1 : 1;
    const ranked = trials.filter((one) => one.state === "complete").sort((a, b) => sign * (a.value - b.value));
    const strength = new Map(ranked.map((one, i) => [one.number, ranked.length > 1 ? 1 - i / (ranked.length - 1) : 1]));
    const lines = [...trials].sort((a, b) => (strength.get(a.number) ?? -1) - (strength.get(b.number) ?? -1)).map((one) => this.line(one, axes, at, strength.get(one.number), found));
    replace(this.box, s("svg", { viewBox: `0 0 ${this.width} ${height}`, width: this.width, height, role: "img", "aria-label": t("Parallel coordinates of {n} trials; the table has the same values.", { n: trials.length }) },
      axes.map((_, i) => { const [[x1, y1], [x2, y2]] = [at(i, 0), at(i, 1)]; return s("line", { x1, y1, x2, y2, class: "rail" }); }),
      s("g", {}, lines), axes.map((one, i) => this.words(one, i, axes.length, at, isNarrow))));
  }

  words(one, i, count, at, isNarrow) {
    const [[x, y], [, top]] = [at(i, 0), at(i, 1)];
    const most = isNarrow ? 48 : Math.max(8, Math.floor((this.width - 112) / Math.max(1, count - 1) / 7.5));
    const anchor = isNarrow || i === 0 ? "start" : i === count - 1 ? "end" : "middle";
    const [nameX, nameY] = isNarrow ? [x, y - 14] : [i === 0 ? x - 46 : i === count - 1 ? x + 46 : x, top - 22];
    const name = s("text", { x: nameX, y: nameY, "text-anchor": anchor, class: one.isResult ? "axis result" : "axis" }, s("title", {}, one.name), short(one.name, most));
    const ticks = one.ticks.map(([v, word]) => {
      const [px, py] = at(i, v);
      return isNarrow ? s("text", { x: px, y: py + 15, "text-anchor": v < 0.1 ? "start" : v > 0.9 ? "end" : "middle", class: "tick" }, short(word, 14))
        : s("text", { x: i === count - 1 ? px + 8 : px - 8, y: py + 4, "text-anchor": i === count - 1 ? "start" : "end", class: "tick" }, short(word, 12));
    });
    return s("g", {}, name, ticks);
  }

  line(one, axes, at, strength, found) {
    const points = axes.map((ax, i) => [i, ax.isResult ? ax.place(one.value) : ax.place(one.values[ax.name])]).filter(([, v]) => v !== null).map(([i, v]) => at(i, v));
    const kind = one.number === found.best ? "best" : one.state === "complete" ? "complete" : one.state === "pruned" ? "pruned" : "other";
    const said = `${t("Trial")} ${one.number}: ${found.keys.map(({ key }) => `${key}=${text(one.values[key])}`).join(" ")} → ${found.row.objective.metric} ${text(one.value)}`;
    const path = s("path", {
      d: points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join(""), class: `trial ${kind}`, "data-trial": one.number,
      "stroke-opacity": strength === undefined ? null : (0.16 + 0.74 * strength).toFixed(2),
      onmouseenter: () => { this.mark(one.number); this.pointed(one); }, onmouseleave: () => { this.mark(null); this.pointed(null); }, onclick: () => this.chosen(one),
    }, s("title", {}, said));
    this.paths.set(one.number, path);
    return path;
  }

  mark(trial) {
    for (const [number_, path] of this.paths) path.classList.toggle("marked", number_ === trial);
    const path = this.paths.get(trial);
    if (path) path.parentNode.append(path);
  }

  close() { this.watcher.disconnect(); }
}
