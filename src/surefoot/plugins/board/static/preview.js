// What commands say of a recipe: rows as the model sees them, the check of all rows, a plan, and
// its differences from another.
import { get, post } from "./api.js";
import { color } from "./chart.js";
import { h, replace, table } from "./dom.js";
import { bytes, duration, integer, NONE, number } from "./format.js";
import { t } from "./i18n.js";

const LABELS = { broken: "Unreadable", cut: "Truncated", equal: "Equal to an earlier row" };
const OVERLAPS = { same: "the same row", prompt: "the same prompt" };
const percent = (share) => `${Number((100 * share).toPrecision(3))} %`;
const places = (rows) => (rows.length ? `(${rows.join(", ")} …)` : "");
const cell = (label, value) => h("div", {}, h("dt", {}, t(label)), h("dd", {}, value));

// Shows a command that runs, how long it takes, and its answer by `show`, or its error.
export async function command(panel, starting, show) {
  try {
    let job = await starting;
    for (; job.code === null; job = await get("api/job", { number: job.job })) {
      const { job: number } = job;
      replace(panel, h("div.command", {}, h("code", { tabindex: 0 }, job.command), h("button.small", { onclick: () => post("api/cancel", {}, { number }) }, t("Cancel"))),
        h("p.soft", { role: "status", style: { margin: "10px 2px" } }, t("Running for {n} s …", { n: Math.round(job.seconds ?? 0) })));
      await new Promise((resolve) => setTimeout(resolve, 400));
    }
    const isWrong = (job.result ?? null) === null && job.code !== 0;
    replace(panel, h("div.command", {}, h("code", { tabindex: 0 }, job.command)),
      h("div", { style: { marginTop: "14px" } }, isWrong ? h("div.note.bad", { role: "alert" }, (job.error || job.output || t("cancelled")).trim()) : show(job.result, job.output)));
    return job;
  } catch (error) {
    replace(panel, h("div.note.bad", { role: "alert" }, error.message));
    return null;
  }
}

// The settings in which the recipes of two runs differ.
export async function recipesOf(a, b) {
  try {
    const { changes } = await get("api/diff", { a, b });
    if (!changes.length) return h("div.panel", {}, h("h2", {}, t("Recipes")), h("p.soft", {}, t("Both recipes are equal.")));
    return h("div.panel", {}, h("h2", {}, t("Settings that differ: {n}", { n: changes.length })),
      table([[t("Setting")], [a, "old"], [b, "new"]], changes.map((c) => [c.path, JSON.stringify(c.old), JSON.stringify(c.new)]), "table.diff"));
  } catch (error) {
    return h("div.note.bad", {}, error.message);
  }
}

export function datasets(found) {
  return found.datasets.map((one) => h("div.panel", {}, h("h2", {}, one.name), figures(one, found.cutoff_len),
    h("div.keys", {}, h("span", {}, h("i", { style: { background: "var(--trained-bg)" } }), t("trained")), h("span", {}, h("i", { style: { background: "var(--line)" } }), t("masked: read, not trained on"))),
    one.shown.map(example)));
}

// The report of `surefoot data check`: findings first, then the figures of each dataset.
export function checked(found) {
  const findings = found.findings.map((one) => h("li", {},
    h("b", { style: { color: one.level === "problem" ? "var(--red)" : "var(--amber)" } }, t(one.level === "problem" ? "problem" : "note")),
    ` ${one.dataset}: ${integer(one.count)} ${one.what} `, h("span.soft", {}, places(one.rows)), one.advice ? h("div.soft", {}, one.advice) : null));
  return h("div.panel", {}, h("h2", {}, t("Check of all rows")),
    found.ok ? h("div.note", {}, `✓ ${t("No problems.")}`) : null,
    findings.length ? h("ul", { style: { margin: "12px 0", paddingLeft: "20px" } }, findings) : null,
    found.overlaps.map((one) => h("p", {}, t("{name}: rows of the evaluation data that are in the training data", { name: one.evaluation }), ": ",
      Object.entries(OVERLAPS).map(([key, label]) => `${t(label)} ${integer(one[key].count)}`).join(" · "))),
    found.datasets.map((one) => h("section", { style: { marginTop: "18px" } }, h("h3", {}, one.name), figures(one, found.cutoff_len))));
}

function figures(one, cutoff) {
  const rows = Object.entries(LABELS).map(([name, label]) => [t(label), one[name]]);
  rows.push(...Object.entries(one.dropped).map(([why, c]) => [t("dropped: {why}", { why }), c]), ...Object.entries({ ...one.odd, ...one.notes }));
  const lines = rows.filter(([, c]) => c.count).map(([label, c]) => [label, integer(c.count), places(c.rows)]);
  lines.push(...one.repeated.map((r) => [t("The same response"), integer(r.count), `${JSON.stringify(r.text)} (${r.row} …)`]));
  return [h("dl.figures", { style: { margin: "8px 0 14px" } }, cell(one.all_rows ? "Rows" : "First rows", integer(one.rows)), cell("Tokens", integer(one.tokens)), cell("Trained on", one.tokens ? percent(one.share_trained) : NONE)),
    lengths(one, cutoff),
    lines.length ? table([[""], ["", "num"], ["", "soft"]], lines) : null,
    one.remarks.map((text) => h("p.soft.small", {}, text)),
    one.unread.length ? h("p.soft.small", {}, t("columns that nothing reads: {names}", { names: one.unread.join(", ") })) : null];
}

function lengths(one, cutoff) {
  const counts = Object.entries(one.lengths).map(([length, n]) => [Number(length), n]);
  if (!counts.length) return null;
  const { 0.5: middle, 0.95: high, 1: longest } = one.quantiles;
  const width = Math.max(1, Math.ceil((longest + 1) / 40));
  const bins = Array.from({ length: Math.ceil((longest + 1) / width) }, () => 0);
  counts.forEach(([length, n]) => { bins[Math.floor(length / width)] += n; });
  const most = Math.max(...bins);
  return h("div", { style: { marginBottom: "10px" } },
    h("div.histogram", { role: "img", "aria-label": t("Lengths") }, bins.map((n, i) => h("i", { class: cutoff && i * width >= cutoff ? "over" : "", style: { height: `${(100 * n) / most}%` }, title: `${i * width}–${(i + 1) * width - 1}: ${n}` }))),
    h("p.soft.small", { style: { margin: "4px 0 0" } }, t("tokens of a sequence before truncation: median {m}, 95 % up to {h}, longest {l}", { m: integer(middle), h: integer(high), l: integer(longest) }),
      cutoff ? ` · data.cutoff_len ${integer(cutoff)}` : ""));
}

function example(one) {
  const trained = one.items.reduce((sum, item) => sum + item.trained_tokens, 0);
  const tokens = one.items.reduce((sum, item) => sum + item.tokens, 0);
  const fate = one.dropped ? t("dropped: {why}", { why: one.dropped }) : t("{n} tokens, {k} trained on", { n: integer(tokens), k: integer(trained) });
  return h("div", { style: { borderTop: "1px solid var(--line)", marginTop: "14px", paddingTop: "10px" } },
    h("div.row.between.small.soft", {}, h("span", {}, one.origin), h("span", {}, fate, one.cut ? ` · ${t("truncated from {n}", { n: integer(one.tokens) })}` : "")),
    one.items.map((item) => h("div.mask", {}, parts(item.parts))));
}

function parts(all) {
  let before = null;
  return all.map((part) => {
    const title = part.answer && part.answer !== before ? h("b", {}, `\n${part.answer}: `) : null;
    before = part.answer;
    return [title, part.learnt ? h("mark", { class: part.answer === "rejected" ? "rejected" : "" }, part.text) : part.text];
  });
}

const PARTS = ["weights", "gradients", "optimizer", "activations", "logits", "working", "buffers", "imported libraries", "copy of a save"];

export function plan(found) {
  const memory = { ...found.memory, "imported libraries": found.process?.imports, "copy of a save": found.process?.snapshot };
  const total = PARTS.reduce((sum, name) => sum + (memory[name] || 0), 0) || 1;
  const capacity = found.processes?.capacity;
  const used = found.process?.total ?? memory.peak;
  const fits = capacity ? used <= capacity : null;
  return h("div.panel", {}, h("h2", {}, t("Plan")),
    h("dl.figures", { style: { marginBottom: "14px" } }, cell("Parameters", number(found.parameters, 3)), cell("Trainable", `${number((100 * found.trained_parameters) / found.parameters, 3)} %`),
      cell("Steps", integer(found.steps)), cell("Tokens", integer(found.tokens)), cell("Time", found.seconds ? duration(found.seconds) : t("unknown")), cell("Disk for checkpoints", bytes(found.checkpoint?.disk))),
    found.not_known ? h("div.note.warn", {}, t("Activations are not known: {why}", { why: found.not_known })) : null,
    h("p", { style: { margin: "0 0 6px" } }, t("Memory of a process at its peak: {size}", { size: bytes(used) }), capacity ? h("b", { style: { color: fits ? "var(--green)" : "var(--red)" } }, ` ${t(fits ? "of {size}" : "more than the available {size}", { size: bytes(capacity) })}`) : ""),
    h("div.stackbar", { role: "img", "aria-label": t("Memory") }, PARTS.map((name, i) => h("i", { title: `${t(name)}: ${bytes(memory[name])}`, style: { width: `${(100 * (memory[name] || 0)) / total}%`, background: color(i) } }))),
    h("div.keys", {}, PARTS.filter((name) => memory[name]).map((name) => h("span", {}, h("i", { style: { background: color(PARTS.indexOf(name)) } }), `${t(name)} ${bytes(memory[name])}`))));
}
