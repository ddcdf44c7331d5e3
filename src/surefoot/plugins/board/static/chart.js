// Curves: uPlot with zoom shared by all charts of a page, a log scale, and a legend of its own.
import { h, replace } from "./dom.js";
import { number } from "./format.js";

const LIGHT = ["#17694c", "#c2570c", "#1a63b8", "#8f3fa8", "#a8780b", "#b3261e", "#0e7c86", "#62666d", "#7a4a1e"];
const DARK = ["#63c79d", "#f0a165", "#7db4f5", "#cf94e3", "#e2c25a", "#f28b82", "#5fc9d1", "#a0a5ad", "#cda27c"];

export const color = (place) => (document.documentElement.dataset.theme === "dark" ? DARK : LIGHT)[place % LIGHT.length];

export class Chart {
  // `zoomed` is called with the first and last step that a drag chose, or with nothing to show all; `picked` with the step of a click.
  constructor(title, { sync, zoomed, picked, wide, height = 210 } = {}) {
    this.title = title;
    this.options = { sync, zoomed, picked, height };
    this.legend = h("div.legend");
    this.box = h("div.plot", { role: "img", "aria-label": title, tabindex: zoomed ? 0 : null, onkeydown: (e) => this.key(e) });
    this.element = h(`section.chart${wide ? ".wide" : ""}`, {}, h("h2", {}, title), this.legend, this.box);
    this.plot = null;
    this.shape = "";
    this.watcher = new ResizeObserver(() => this.fit());
    this.watcher.observe(this.box);
  }

  // Series: {label, steps, values, color, dashed, faint}; each has steps of its own.
  draw(series, { log = false, range = null } = {}) {
    this.series = series;
    const table = !series.length ? [[]] : uPlot.join(series.map((s) => [s.steps, log ? s.values.map((v) => (v > 0 ? v : null)) : s.values]),
      series.map(() => [0, 1])); // a value that is not finite stays a gap
    const shape = JSON.stringify([log, series.map((s) => [s.label, s.color, s.dashed, s.faint]), document.documentElement.dataset.theme]);
    this.range = range;
    if (this.plot && shape === this.shape) this.plot.setData(table);
    else this.build(table, log, shape);
    this.named(null);
  }

  build(table, log, shape) {
    this.plot?.destroy();
    this.shape = shape;
    const { color: soft, borderTopColor: line } = getComputedStyle(this.box);
    const axis = { stroke: soft, grid: { stroke: line, width: 1 }, ticks: { show: false }, font: "12px system-ui" };
    this.plot = new uPlot({
      width: this.box.clientWidth || 360, height: this.options.height,
      legend: { show: false },
      cursor: { sync: this.options.sync ? { key: this.options.sync, setSeries: false } : undefined, drag: { x: true, y: false, setScale: false }, points: { size: 6 }, bind: { dblclick: () => () => { this.options.zoomed?.(); } } },
      scales: {
        x: { time: false, range: (_, low, high) => this.range || (low === high ? [low - 1, high + 1] : [low, high]) },
        y: log ? { distr: 3 } : {},
      },
      padding: [null, 24, null, null], // half of the last step's digits
      axes: [{ ...axis, size: 30, space: 80, values: (_, ticks) => ticks.map((v) => (v === null ? "" : number(v, 6))) },
        { ...axis, size: 58, values: (_, ticks) => ticks.map((v) => (v === null ? "" : number(v, 3))) }],
      series: [{}, ...this.series.map((s) => ({
        label: s.label, stroke: s.faint ? `${s.color}44` : s.color, width: s.faint ? 1 : 1.7,
        dash: s.dashed ? [6, 4] : undefined, spanGaps: false,
        points: { show: s.steps.length < 40 && !s.faint, size: 5, fill: s.color },
      }))],
      hooks: {
        setCursor: [(plot) => this.named(plot.cursor.idx)],
        setSelect: [(plot) => {
          if (plot.select.width < 4) return;
          const [low, high] = [plot.posToVal(plot.select.left, "x"), plot.posToVal(plot.select.left + plot.select.width, "x")];
          plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
          this.options.zoomed?.(low, high);
        }],
      },
    }, table, this.box);
    this.plot.over.addEventListener("click", () => { // which uPlot keeps back at the end of a drag
      const { idx } = this.plot.cursor;
      if (idx !== null && idx !== undefined) this.options.picked?.(this.plot.data[0][idx]);
    });
  }

  // The same as a drag, by keys.
  key(event) {
    const { min, max } = this.plot?.scales.x || {};
    const [low, high] = [min, max].map(Number), width = high - low;
    const part = { "+": [0.25, -0.25], "=": [0.25, -0.25], "-": [-0.5, 0.5], ArrowLeft: [-0.25, -0.25], ArrowRight: [0.25, 0.25] }[event.key];
    if (event.ctrlKey || event.metaKey || event.altKey || !this.options.zoomed || !(width > 0)) return;
    if (event.key === "0") this.options.zoomed();
    else if (part) this.options.zoomed(Math.max(0, low + part[0] * width), high + part[1] * width);
    else return;
    event.preventDefault();
  }

  named(index) {
    const data = this.plot?.data;
    replace(this.legend, this.series.filter((s) => !s.hidden).map((s) => {
      const values = data[this.series.indexOf(s) + 1];
      const at = index ?? null;
      const value = at === null ? [...s.values].reverse().find((v) => v !== null) : values[at];
      const mark = h("i", { style: { background: s.color } });
      return h("span", {}, mark, s.label, h("b", {}, number(value)));
    }), index === null || index === undefined ? null : h("span.soft", {}, `step ${number(data[0][index], 9)}`));
  }

  fit() {
    const width = this.box.clientWidth;
    if (this.plot && width && Math.abs(width - this.plot.width) > 1) this.plot.setSize({ width, height: this.options.height });
  }

  close() {
    this.watcher.disconnect();
    this.plot?.destroy();
  }
}

let loading;
export function loadPlots() {
  loading ||= new Promise((resolve, reject) => {
    const script = h("script", { src: "static/vendor/uPlot.js" });
    script.onload = resolve;
    script.onerror = () => reject(new Error("uPlot"));
    document.head.append(script);
  });
  return loading;
}
