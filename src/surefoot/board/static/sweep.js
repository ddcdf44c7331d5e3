// One sweep: parallel coordinates, importance of each setting, and a table of all trials.
import { get } from "./api.js";
import { to } from "./app.js";
import { h, redraw, replace } from "./dom.js";
import { integer, NONE, number } from "./format.js";
import { t } from "./i18n.js";
import { Parallel } from "./parallel.js";
import { badge } from "./state.js";
import { tally } from "./sweeps.js";

const EVERY = 3000;
const last = (key) => key.split(".").at(-1);
export const shown = (value) => (typeof value === "number" ? number(value) : typeof value === "string" ? value : JSON.stringify(value));

export async function page(body, { sweep }) {
  let isOpen = true, isGone = false, timer = 0, before = "";
  const head = h("div.stack"), note = h("div"), bars = h("div"), list = h("div.panel.flush");
  const lines = new Parallel((trial) => { if (trial.run) location.hash = to("run", { run: trial.run }); }, mark);
  replace(body, head, note, lines.element, bars, list);

  function mark(trial) {
    list.querySelectorAll("tr.marked").forEach((row) => row.classList.remove("marked"));
    if (trial) list.querySelector(`tr[data-trial="${trial.number}"]`)?.classList.add("marked");
  }

  function top(found) {
    const { row } = found;
    const { metric, direction, sentence } = row.objective;
    const cell = (label, value) => h("div", {}, h("dt", {}, t(label)), h("dd", {}, value));
    redraw(head, h("div.row.between", {}, h("div.row", {}, h("h1", {}, row.sweep), badge(row)),
      found.best_file ? h("a.button", { href: to("new", { file: found.best_file }) }, t("New run from the best recipe")) : null),
    sentence ? h("p.soft", {}, sentence) : null,
    row.problem ? h("div.note.bad", {}, row.problem) : null,
    found.remarks.map((text) => h("div.note.warn", {}, text)),
    found.is_cut ? h("div.note", {}, t("Only the first trials are shown.")) : null,
    h("dl.figures", {}, cell("Trials", `${integer(found.trials.length)} / ${integer(row.requested)}`),
      h("div", {}, h("dt", {}, direction === "maximize" ? t("Largest {metric}", { metric }) : t("Smallest {metric}", { metric })), h("dd", {}, number(row.best))),
      cell("Best trial", found.best ?? NONE), cell("Sampler", found.sampler ?? NONE), cell("Pruner", found.pruner ?? NONE)),
    h("p.soft", {}, tally(row.counts)));
  }

  function importance(found) {
    const shares = Object.entries(found.importance).sort((a, b) => b[1] - a[1]);
    if (!shares.length) { replace(bars); return; }
    replace(bars, h("section.panel", {}, h("h2", {}, t("Importance of settings")),
      h("dl.importance", {}, shares.map(([key, share]) => [h("dt", { title: key }, key), h("dd", {}, h("div.bar", {}, h("i", { style: { width: `${100 * share}%` } })), h("span", {}, `${Math.round(100 * share)} %`))])),
      h("p.soft.small", {}, t("Share of each setting in what tells the best tenth of {n} complete trials from the rest (PED-ANOVA). With few trials it is a hint.", { n: found.row.counts.complete || 0 }))));
  }

  function table(found) {
    const keys = found.keys.map((one) => one.key);
    const names = keys.map(last);
    const titles = keys.map((key, i) => (names.filter((name) => name === names[i]).length > 1 ? key : names[i]));
    const sign = found.row.objective.direction === "maximize" ? -1 : 1;
    const rank = (one) => (one.state === "complete" && one.value !== null ? sign * one.value : Infinity);
    const sorted = [...found.trials].sort((a, b) => (rank(a) === rank(b) ? a.number - b.number : rank(a) - rank(b)));
    const state = (one) => {
      if (one.live) return h("td.state", {}, badge(one.live), one.live.step === null ? null : h("small.soft", {}, ` ${integer(one.live.step)} / ${integer(one.live.max_steps)}`));
      return h("td.state", {}, h(`span.badge.${one.state}`, { title: one.reason || null }, t(`trial:${one.state}`)), one.reason ? h("small.soft", {}, one.reason) : null);
    };
    const line = (one) => h(one.number === found.best ? "tr.best" : "tr", { "data-trial": one.number, onmouseenter: (e) => lines.mark(Number(e.currentTarget.dataset.trial)), onmouseleave: () => lines.mark(null) },
      h("td.name", {}, one.run ? h("a", { href: to("run", { run: one.run }) }, `${t("Trial")} ${one.number}`) : `${t("Trial")} ${one.number}`),
      state(one), h("td.num", { "data-label": found.row.objective.metric }, number(one.value)),
      h("td.num", { "data-label": t("Step") }, one.step === null ? NONE : integer(one.step)),
      keys.map((key, i) => h("td.num", { "data-label": titles[i] }, shown(one.values[key]))));
    redraw(list, h("div.scroll", { tabindex: 0 }, h("table.runs.trials", {}, h("thead", {}, h("tr", {}, h("th", {}, t("Trial")), h("th", {}, t("State")), h("th.num", {}, found.row.objective.metric), h("th.num", {}, t("Step")), titles.map((title, i) => h("th.num", { title: keys[i] }, title)))), h("tbody", {}, sorted.map(line)))));
  }

  async function refresh() {
    clearTimeout(timer);
    try {
      if (!document.hidden || !before) {
        const found = await get("/api/sweep", { sweep });
        if (!isOpen) return;
        replace(note);
        const text = JSON.stringify(found);
        if (text !== before) {
          before = text;
          top(found);
          lines.draw(found);
          importance(found);
          table(found);
        }
      }
    } catch (error) {
      if (!before) throw error;
      isGone = error.status === 404;
      if (isOpen) replace(note, h("div.note.bad", { role: "alert" }, isGone ? t("The folder of this sweep was removed.") : t("The board does not answer: {why}", { why: error.message })));
    }
    if (isOpen && !isGone) timer = setTimeout(refresh, EVERY);
  }

  await refresh();
  return () => { isOpen = false; clearTimeout(timer); lines.close(); };
}
