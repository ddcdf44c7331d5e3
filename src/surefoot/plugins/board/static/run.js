// One run: its state with evidence, live curves, samples, checkpoints, log, recipe.
import { get, post } from "./api.js";
import { to } from "./app.js";
import { Chart, color, loadPlots } from "./chart.js";
import { checkpoints } from "./checkpoints.js";
import { ask, h, redraw, replace, table, toast } from "./dom.js";
import { badge, bytes, duration, evidence, integer, moment, NONE, number, stateOf } from "./format.js";
import { t } from "./i18n.js";
import { command, recipesOf } from "./preview.js";
import { samples } from "./samples.js";

const TABS = { curves: "Curves", samples: "Samples", checkpoints: "Checkpoints", log: "Log", recipe: "Recipe" };
const LOOK = 500; // milliseconds
const HIDDEN = new Set(["epoch", "num_input_tokens_seen", "elapsed", "step"]);
const CONFUSION = /^(eval_.*?)confusion\/(.*)\/(.*)$/; // how often one class is predicted as another
const FIRST = ["loss", "learning_rate", "grad_norm", "tokens_per_second", "peak_memory", "save_blocking_seconds"];
const LABELS = {
  loss: "Loss", learning_rate: "Learning rate", grad_norm: "Gradient norm", tokens_per_second: "Tokens per second",
  peak_memory: "Peak memory (GB)", save_blocking_seconds: "Time lost to saves (s)",
};

export async function page(body, { run, tab = "curves" }) {
  if (!TABS[tab] || tab === "curves") loadPlots().catch(() => {}); // while the rest is on its way
  let details = await get("api/run", { run });
  let row = details.row, isOpen = true, inner = null;
  const head = h("div.stack"), unanswered = h("div");
  const content = h("div.stack");
  const tabs = h("div.tabs", { role: "navigation", "aria-label": t("Parts of the run") }, Object.entries(TABS).map(([name, label]) =>
    h("a", { href: to("run", { run, tab: name === "curves" ? null : name }), "aria-current": name === tab ? "page" : null }, t(label))));
  replace(body, head, unanswered, tabs, content);
  const current = tabs.querySelector("[aria-current]");
  if (current) tabs.scrollLeft = current.offsetLeft - tabs.offsetLeft + current.offsetWidth - tabs.clientWidth; // on a phone

  function top() {
    const part = row.step !== null && row.max_steps ? Math.min(1, row.step / row.max_steps) : null;
    const cell = (label, value, title) => h("div", { title }, h("dt", {}, t(label)), h("dd", {}, value));
    const state = stateOf(row), error = row.reason || (row.state === "failed" && row.end?.error);
    const stopping = h("button.danger.writes", { onclick: async (e) => {
      if (!await ask(t("Stop {run}? It finishes its step, saves and exits. The same command resumes it.", { run }), t("Stop the run"), t("Cancel"))) return;
      e.target.disabled = true;
      try { await post("api/stop", {}, { run }); toast(t("It finishes its step and saves.")); } catch (fault) { toast(fault.message); e.target.disabled = false; }
    } }, t("Stop"));
    const resume = h("button.writes", { onclick: async (e) => {
      e.target.disabled = true;
      try { await post("api/resume", {}, { run }); toast(t("Resuming.")); } catch (fault) { toast(fault.message); e.target.disabled = false; }
    } }, t("Resume"));
    redraw(head,
      h("div.row.between", {}, h("div.row", {}, h("h1", {}, run === "." ? row.name : run), badge(row)),
        h("div.row", {}, row.state === "running" ? stopping : null,
          ["died", "stopped", "failed", "ended"].includes(state) ? resume : null,
          row.has_begun ? h("a.button.writes", { href: to("chat", { run }) }, t("Chat")) : null, details.recipe ? h("a.button.writes", { href: to("new", { run }) }, t("New run like this")) : null)),
      h("p.soft", {}, evidence(row)),
      part !== null && row.state !== "complete" ? h("div.progress", { role: "progressbar", "aria-valuenow": Math.round(100 * part), "aria-valuemin": 0, "aria-valuemax": 100, "aria-label": t("Step") }, h("i", { style: { width: `${100 * part}%` } })) : null,
      row.begins_with ? h("p.soft", {}, `${t("Continues")} `, parent(row.begins_with)) : null,
      error ? h("div.note.bad", { role: "alert" }, error) : null,
      details.recipe_problem && row.has_begun ? h("div.note.bad", {}, details.recipe_problem) : null,
      details.metrics_problem ? h("div.note.warn", {}, `metrics.jsonl: ${details.metrics_problem}`) : null,
      h("dl.figures", {},
        cell("Step", row.step === null ? NONE : row.max_steps ? `${integer(row.step)} / ${integer(row.max_steps)}` : integer(row.step)),
        cell("Loss", number(row.loss)), row.metric.value === null ? null : cell(row.metric.name, number(row.metric.value)), cell("Tokens/s", integer(row.speed)),
        row.state === "running" ? cell("Time left", duration(row.seconds_left)) : null,
        cell("Size", bytes(details.size)), cell("Launches", details.launches.length || NONE)));
  }

  top();
  const parts = { curves, samples: () => samples(content, run, details), checkpoints: () => checkpoints(content, run, () => row), log, recipe };
  inner = await (parts[tab] || curves)();

  // ---- live: what has changed is drawn
  let timer = 0, drawn = "", numRows = null;
  async function look() {
    try {
      const now = await get("api/state", { run });
      if (!isOpen) return;
      replace(unanswered);
      if (now.state === "gone") {
        row = { ...row, ...now };
        replace(head, h("h1", {}, run), h("div.note.bad", { role: "alert" }, t("The folder of this run was removed.")));
        return;
      }
      const isOther = now.state !== row.state || now.evidence !== row.evidence;
      row = { ...row, ...now };
      if (isOther) {
        try { details = await get("api/run", { run }); row = details.row; } catch { /* the next look says so */ }
        if (!isOpen) return;
        inner?.changed?.();
      } else if (numRows !== null && numRows !== now.num_rows) inner?.rows?.();
      numRows = now.num_rows;
      const text = JSON.stringify(row);
      if (text !== drawn) top();
      drawn = text;
    } catch (error) {
      if (isOpen) redraw(unanswered, h("div.note.bad", { role: "alert" }, t("The board does not answer: {why}", { why: error.message })));
    }
    if (isOpen) timer = setTimeout(look, LOOK);
  }

  // ---- tabs
  async function curves() {
    await loadPlots();
    const stored = JSON.parse(localStorage.getItem("curves") || "{}");
    const view = { log: false, half: 0, range: null, ...stored, range: null };
    const charts = new Map();
    const grid = h("div.charts"), below = h("div");
    const keep = () => localStorage.setItem("curves", JSON.stringify({ log: view.log, half: view.half }));
    const log = h("button", { "aria-pressed": String(view.log), onclick: () => { view.log = !view.log; log.setAttribute("aria-pressed", view.log); keep(); draw(); } }, t("Log scale"));
    const slider = h("input", { type: "range", min: 0, max: 6, step: 1, value: view.half ? Math.log2(view.half) + 1 : 0, "aria-label": t("Smoothing"), oninput: (e) => { view.half = Number(e.target.value) ? 2 ** (e.target.value - 1) : 0; keep(); fetchAll(); } });
    const whole = h("button", { hidden: true, onclick: () => zoom() }, t("Show all"));
    const rows = h("div.panel", { hidden: true }), step = h("input", { type: "number", min: 1, style: { width: "84px" }, "aria-label": t("Step") });
    function rowsOf(number) {
      step.value = number;
      rows.hidden = false;
      command(rows, post("api/rows", { run, step: Number(number) }), (_, text) => h("pre.log", { tabindex: 0, "aria-label": t("Rows of this step"), style: { maxHeight: "220px" } }, text));
    }
    replace(content, h("div.row", {}, log, h("label.row.soft", {}, t("Smoothing"), slider), h("div.grow"), whole,
      h("span.soft.small", {}, t("Drag, or + and −, to zoom; arrow keys to move; 0 to show all.")), h("label.row.soft.writes", {}, t("Step"), step),
      h("button.writes", { title: t("Also by a click on a point of the loss"), onclick: () => { if (step.value) rowsOf(step.value); } }, t("Rows of this step"))), rows, grid, below);
    let isBusy = false, isStale = false, found = {};

    function zoom(low, high) {
      view.range = low === undefined ? null : [low, high];
      whole.hidden = !view.range;
      fetchAll();
    }

    async function fetchAll() {
      if (isBusy) { isStale = true; return; }
      isBusy = true;
      try {
        const names = [...new Set([...details.metrics, ...FIRST])].filter((name) => !HIDDEN.has(name));
        const series = {};
        for (let at = 0; at < names.length; at += 30) {
          const [first, last] = view.range || [];
          const one = await get("api/series", { run, names: names.slice(at, at + 30).join(","), points: 1200, smooth: view.half, first, last });
          Object.assign(series, one.series);
        }
        found = series;
        if (isOpen) draw();
      } catch (error) { if (isOpen && !charts.size) replace(grid, h("div.note.bad", {}, error.message)); }
      isBusy = false;
      if (isStale && isOpen) { isStale = false; setTimeout(fetchAll, 300); }
    }

    function groups() {
      const names = Object.keys(found).filter((name) => !CONFUSION.test(name));
      const of = new Map();
      for (const name of names) {
        const base = name.startsWith("eval_") && found[name.slice(5)] ? name.slice(5) : name;
        of.set(base, [...(of.get(base) || []), name].sort((a, b) => a.length - b.length));
      }
      const rank = (name) => (FIRST.includes(name) ? FIRST.indexOf(name) : FIRST.length + (name.startsWith("eval_") ? 1 : 0));
      return [...of].sort(([a], [b]) => rank(a) - rank(b) || a.localeCompare(b));
    }

    function confusions() {
      const tables = {};
      for (const name of Object.keys(found)) {
        const [, of, truth, predicted] = CONFUSION.exec(name) || [];
        if (of) ((tables[of] ??= {})[truth] ??= {})[predicted] = found[name].values.at(-1);
      }
      return Object.entries(tables).map(([of, rows]) => h("div.panel", {}, h("h2", {}, `${t("Confusions at the last evaluation")} ${of.slice(5, -1)}`),
        table([[t("true ↓ predicted →")], ...Object.keys(rows).map((name) => [name, "num"])], Object.entries(rows).map(([truth, counts]) => [truth, ...Object.keys(rows).map((name) => String(counts[name] ?? ""))]))));
    }

    function draw() {
      replace(below, ...confusions());
      const all = groups();
      if (!all.length) { replace(grid, h("div.empty", { style: { gridColumn: "1 / -1" } }, t("No metrics yet. The first line is written at the first log (train.log_steps)."))); return; }
      if (!charts.size) replace(grid);
      for (const [base, names] of all) {
        if (!charts.has(base)) {
          const chart = new Chart(t(LABELS[base] || base), { sync: "run", zoomed: zoom, picked: base === "loss" ? rowsOf : undefined, wide: base === "loss", height: base === "loss" ? 300 : 190 });
          charts.set(base, chart);
          grid.append(chart.element);
        }
        const scale = base === "peak_memory" ? 1e-9 : 1;
        const series = names.flatMap((name, place) => {
          const { steps, values, smooth } = found[name];
          const scaled = values.map((v) => (v === null ? null : v * scale));
          const line = { label: name, steps, values: scaled, color: color(place) };
          return smooth ? [{ ...line, faint: true, hidden: true }, { ...line, steps: smooth.steps, values: smooth.values.map((v) => (v === null ? null : v * scale)) }] : [line];
        });
        charts.get(base).draw(series, { log: view.log, range: view.range });
      }
    }

    await fetchAll();
    return { rows: () => fetchAll(), changed: () => fetchAll(), close: () => charts.forEach((chart) => chart.close()) };
  }

  async function log() {
    const text = h("pre.log", { tabindex: 0, "aria-label": t("Log") });
    const ended = ({ end }, isLast) => {
      if (!end) return isLast && row.state === "running" ? t("state:running") : t("no end recorded");
      return [t(`state:${end.outcome}`), end.signal, end.step !== undefined ? t("at step {n}", { n: end.step }) : null].filter(Boolean).join(" ");
    };
    const columns = [["#", "num"], [t("Began"), "whole"], [t("Host and process"), "whole"], [t("Device"), "device"], [t("Resumed from"), "whole"], [t("Ended"), "whole"], [t("Took"), "num"]];
    const rows = details.launches.map((one, i) => [i + 1, moment(one.begin.time), `${one.begin.host} · ${one.begin.pid}`,
      [`${one.begin.device ?? NONE} × ${one.begin.ranks ?? 1}`, h("div.soft.small", {}, machine(one.begin))], one.begin.resumed_from || t("from scratch"),
      ended(one, i === details.launches.length - 1), one.end ? duration(one.end.time - one.begin.time) : NONE]);
    const { wall, seconds = {} } = details.goodput ?? {};
    const words = { trained: t("trained"), repeated: t("repeated"), saving: t("waited for saves"), evaluating: t("evaluating"), callbacks: t("callbacks"),
      data: t("waited for data"), starting: t("opening model and data"), ending: t("results and uploads"), down: t("no launch ran"), unrecorded: t("not recorded") };
    const spent = Object.entries(seconds).filter(([, value]) => value >= 0.5)
      .map(([part, value]) => [words[part] ?? part, duration(value), number((100 * value) / wall, 3)]);
    const where = [[t("Where the time went"), "whole"], [t("Took"), "num"], ["%", "num"]];
    const causes = { data: t("data"), compute: t("compute") };
    const percent = (share) => number(100 * share, 3);
    const slow = (details.launches.at(-1)?.slow_ranks ?? []).slice(-20).map((one) => [one.step, one.rank, causes[one.what] ?? one.what, percent(one.share), percent(one.share_of_others), percent(one.waited)]);
    const slowness = [[t("Step"), "num"], [t("Slow rank"), "num"], [t("Slow in"), "whole"], [t("% of its step"), "num"], [t("% on others"), "num"], [t("% that others wait"), "num"]];
    replace(content, spent.length ? h("div.panel", {}, table(where, spent)) : null, slow.length ? h("div.panel", {}, table(slowness, slow)) : null, h("div.panel", {}, h("h2", {}, t("Launches")), rows.length ? table(columns, rows) : h("p.soft", {}, t("This run has no record of its launches."))),
      h("div.panel", {}, h("h2", {}, t("Log")), text));
    async function refresh() {
      const answer = await get("api/log", { run });
      const isAtEnd = text.scrollTop + text.clientHeight > text.scrollHeight - 40;
      text.textContent = answer.is_there ? answer.text.replace(/\x1b\[[0-9;]*m/g, "") : t("This run was started in a terminal, which has its log.");
      if (isAtEnd) text.scrollTop = text.scrollHeight;
    }
    await refresh();
    const timer = setInterval(() => { if (row.state !== "gone") refresh().catch(() => {}); }, 2000);
    return { close: () => clearInterval(timer) };
  }

  async function recipe() {
    const others = (await get("api/runs")).runs.map((r) => r.run).filter((name) => name !== run);
    const differing = h("div");
    const select = h("select", { "aria-label": t("Compare with …"), onchange: async (e) => replace(differing, e.target.value ? await recipesOf(run, e.target.value) : "") },
      h("option", { value: "" }, t("Compare with …")), others.map((name) => h("option", { value: name }, name)));
    replace(content, h("div.row", {}, h("a.button.writes", { href: to("new", { run }) }, t("New run like this")), select), differing,
      h("pre.log", { tabindex: 0, "aria-label": t("Recipe") }, details.recipe || details.recipe_problem));
    return {};
  }

  look();
  return () => { isOpen = false; clearTimeout(timer); inner?.close?.(); };
}

// The checkpoint that a run began with; a link if it is of a run of this board.
function parent(path) {
  const found = path.match(/^(.*)\/(checkpoint-\d+)$/);
  return found && !path.startsWith("/") && !path.includes("://") ? h("a", { href: to("run", { run: found[1], tab: "checkpoints" }) }, path) : h("span.mono", {}, path);
}

const machine = (one) => [one.device_name, one.cores ? t("{n} cores", { n: one.cores }) : null, one.memory ? bytes(one.memory) : null,
  one.surefoot ? `surefoot ${one.surefoot}` : null, one.torch ? `torch ${one.torch}` : null].filter(Boolean).join(" · ");
