// Runs: the table, sorted and filtered; curves of several in one picture; two recipes compared.
import { get, post } from "./api.js";
import { to } from "./app.js";
import { Chart, color, loadPlots } from "./chart.js";
import { h, redraw, replace, toast } from "./dom.js";
import { ago, badge, duration, integer, NONE, number, stateOf } from "./format.js";
import { t } from "./i18n.js";
import { recipesOf } from "./preview.js";

const COLUMNS = [
  { key: "name", label: "Run", of: (r) => r.run },
  { key: "state", label: "State", of: (r) => ["running", "died", "failed", "unknown", "stopped", "ended", "complete"].indexOf(r.state) },
  { key: "step", label: "Step", num: true, of: (r) => r.step },
  { key: "loss", label: "Loss", num: true, of: (r) => r.loss },
  { key: "metric", label: "Metric", num: true, of: (r) => r.metric.value },
  { key: "speed", label: "Tokens/s", num: true, of: (r) => r.speed },
  { key: "left", label: "Time left", num: true, of: (r) => r.seconds_left },
  { key: "changed", label: "Changed", num: true, of: (r) => r.changed },
];
const EVERY = 3000;
const FRESH = 3600; // seconds for which a run that did not start is shown

export async function page(body) {
  const view = { sort: "changed", down: true, filter: "", hasAll: false, chosen: new Set(), metric: "loss", log: false };
  let runs = [], root = "", isCut = false, timer = 0, isOpen = true, chart = null, drawn = "", turn = 0;
  const search = h("input", {
    type: "search", placeholder: t("Filter by name, state, model, method …"), "aria-label": t("Filter by name, state, model, method …"),
    oninput: (event) => { view.filter = event.target.value.toLowerCase(); table(); },
  });
  const count = h("span.soft");
  const list = h("div.panel.flush");
  const below = h("div.stack"), beside = h("div.beside", {}, list, below);
  const jump = h("button.primary.jump", { hidden: true, onclick: () => below.scrollIntoView({ block: "start" }) });
  const unstarted = h("button.quiet", { hidden: true, onclick: () => { view.hasAll = !view.hasAll; table(); } });
  replace(body, h("div.row.between", {}, h("h1", {}, t("Runs")), h("a.button.writes", { href: to("new") }, t("New run"))),
    h("div.row", {}, h("div.grow", {}, search), unstarted, count), beside, jump);
  search.style.width = "min(100%, 380px)";

  const isOld = (run) => stateOf(run) === "not_started" && Date.now() / 1000 - (run.changed ?? 0) > FRESH;

  const shown = () => {
    const words = view.filter.split(/\s+/).filter(Boolean);
    const kept = runs.filter((run) => {
      if (!view.hasAll && isOld(run)) return false;
      const text = [run.run, run.state, t(`state:${stateOf(run)}`), run.model, run.method, run.stage].join(" ").toLowerCase();
      return words.every((word) => text.includes(word));
    });
    const { of } = COLUMNS.find((c) => c.key === view.sort);
    const sign = view.down ? -1 : 1;
    return kept.sort((a, b) => {
      const [x, y] = [of(a), of(b)];
      if (x === y) return a.run.localeCompare(b.run);
      if (x === null || x === undefined) return 1;
      if (y === null || y === undefined) return -1;
      return sign * (typeof x === "string" ? x.localeCompare(y, undefined, { numeric: true }) : x - y);
    });
  };

  const head = () => h("tr", {}, h("th.pick", {}, h("span.skip", {}, t("Select"))), COLUMNS.map((column) => {
    const isSorted = view.sort === column.key;
    const turn = () => { view.down = isSorted && !view.down; view.sort = column.key; table(); };
    return h(column.num ? "th.num" : "th", { "aria-sort": isSorted ? (view.down ? "descending" : "ascending") : null },
      h("button", { "data-key": column.key, onclick: turn }, t(column.label), isSorted ? (view.down ? " ↓" : " ↑") : ""));
  }));

  const line = (run) => {
    const part = run.step !== null && run.max_steps ? Math.min(1, run.step / run.max_steps) : null;
    const pick = h("input", {
      type: "checkbox", "aria-label": t("Select {name}", { name: run.run }), checked: view.chosen.has(run.run), disabled: !run.has_begun,
      onchange: (event) => { view.chosen[event.target.checked ? "add" : "delete"](run.run); compare(); },
    });
    return h("tr", { "data-run": run.run }, h("td.pick", {}, pick),
      h("td.name", {}, h("a", { href: to("run", { run: run.run }) }, run.run === "." ? root : run.run),
        h("small", {}, run.reason ? run.reason : run.recipe_problem ? t("recipe cannot be read") : [run.model, run.stage, run.method].filter(Boolean).join(" · "))),
      h("td.state", {}, badge(run)),
      h("td.num", { "data-label": t("Step") }, run.step === null ? NONE : integer(run.step), run.max_steps && run.state !== "complete" ? h("span.soft", {}, ` / ${integer(run.max_steps)}`) : "",
        part !== null && run.state === "running" ? h("div.bar", {}, h("i", { style: { width: `${100 * part}%` } })) : null),
      h("td.num", { "data-label": t("Loss") }, number(run.loss)),
      h("td.num", { "data-label": run.metric.name, title: run.metric.name }, number(run.metric.value)),
      h("td.num", { "data-label": t("Tokens/s") }, integer(run.speed)),
      h("td.num", { "data-label": t("Time left"), class: run.seconds_left === null ? "hide" : "" }, duration(run.seconds_left)),
      h("td.num.soft.hide", {}, ago(run.changed)));
  };

  async function demo({ target }) {
    target.disabled = true;
    try { location.hash = to("run", { run: (await post("api/demo")).run, tab: "log" }); } catch (fault) { toast(fault.message); target.disabled = false; }
  }

  function table() {
    const kept = shown(), old = runs.filter(isOld).length;
    unstarted.hidden = !old;
    unstarted.textContent = t("{n} did not start", { n: old });
    unstarted.setAttribute("aria-pressed", view.hasAll);
    count.textContent = t("{k} of {n} runs", { k: kept.length, n: runs.length });
    if (!runs.length) {
      if (!list.querySelector(".empty")) replace(list, h("div.empty", {}, t("No runs below {root} yet.", { root }), h("div.writes", {}, h("p", {}, h("button.primary", { onclick: demo }, t("Train the demo"))), h("p.small", {}, t("A small model learns to read orders: about two minutes on two cores, without a network."))), h("code", {}, "surefoot train recipe.yaml")));
      return;
    }
    redraw(list, h("div.scroll", { tabindex: 0 }, h("table.runs", {}, h("thead", {}, head()), h("tbody", {}, kept.map(line)))),
      isCut ? h("div.note", {}, t("There may be more runs: the search ended at its limit.")) : null);
  }

  // A later call replaces an earlier one that still waits for its answers.
  async function compare() {
    const mine = ++turn;
    const isLate = () => mine !== turn || !isOpen;
    const names = [...view.chosen].filter((name) => runs.some((run) => run.run === name));
    beside.classList.toggle("open", names.length > 0);
    jump.hidden = !names.length;
    jump.textContent = t("Compare {n} runs", { n: names.length });
    if (!names.length) { chart?.close(); chart = null; drawn = ""; replace(below); return; }
    await loadPlots();
    if (isLate()) return;
    if (!chart || drawn !== names.join("\n")) {
      const known = new Set();
      const details = await Promise.allSettled(names.map((run) => get("api/run", { run })));
      details.forEach((d) => d.value?.metrics.forEach((name) => known.add(name)));
      const differing = h("div");
      if (names.length === 2) replace(differing, await recipesOf(...names));
      else if (names.length > 2) replace(differing, h("p.soft", {}, t("Select exactly two runs to compare their recipes.")));
      if (isLate()) return;
      chart?.close();
      drawn = names.join("\n");
      chart = new Chart(t("Curves"), { wide: true, height: 300, zoomed: (low, high) => { view.range = low === undefined ? null : [low, high]; curves(names); } });
      if (!known.has(view.metric)) view.metric = known.has("loss") ? "loss" : [...known][0];
      const select = h("select", { "aria-label": t("Metric"), onchange: (e) => { view.metric = e.target.value; curves(names); } },
        [...known].filter((name) => name !== "epoch").sort().map((name) => h("option", { value: name, selected: name === view.metric }, name)));
      const log = h("button", { "aria-pressed": String(view.log), onclick: (e) => { view.log = !view.log; e.target.setAttribute("aria-pressed", view.log); curves(names); } }, t("Log scale"));
      replace(below, h("div.row.between", {}, h("h2", { style: { margin: "8px 0 0" } }, t("Compare {n} runs", { n: names.length })), h("div.row", {}, select, log,
        h("button.quiet", { onclick: () => { view.chosen.clear(); table(); compare(); } }, t("Clear")))), chart.element, differing);
    }
    await curves(names);
  }

  async function curves(names) {
    const [first, last] = view.range || [];
    const found = await Promise.allSettled(names.map((run) => get("api/series", { run, names: view.metric, points: 1500, first, last })));
    if (!isOpen || !chart || drawn !== names.join("\n")) return;
    const series = names.map((run, place) => ({ run, place, one: found[place].value?.series[view.metric] }))
      .filter(({ one }) => one)
      .map(({ run, place, one }) => ({ label: run, steps: one.steps, values: one.values, color: color(place) }));
    chart.draw(series, { log: view.log, range: view.range });
  }

  async function refresh() {
    clearTimeout(timer);
    try {
      if (!document.hidden || !runs.length) {
        const found = await get("api/runs");
        if (!isOpen) return;
        ({ runs, root, is_cut: isCut } = found);
        table();
        if (view.chosen.size && runs.some((run) => run.state === "running" && view.chosen.has(run.run))) await compare();
      }
    } catch (error) {
      if (isOpen) replace(count, h("span", { style: { color: "var(--red)" } }, t("The board does not answer: {why}", { why: error.message })));
    }
    if (isOpen) timer = setTimeout(refresh, EVERY);
  }

  await refresh();
  return () => { isOpen = false; clearTimeout(timer); chart?.close(); };
}
