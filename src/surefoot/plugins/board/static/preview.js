// Rows as the model sees them, with the loss mask; and the bars of a plan.
import { color } from "./chart.js";
import { h } from "./dom.js";
import { bytes, duration, integer, number } from "./format.js";
import { t } from "./i18n.js";

export function datasets(found) {
  return found.datasets.map((one) => h("div.panel", {}, h("h2", {}, one.name), figures(one), problems(one), lengths(one.lengths, found.cutoff_len),
    h("div.keys", {}, h("span", {}, h("i", { style: { background: "var(--trained-bg)" } }), t("trained")), h("span", {}, h("i", { style: { background: "var(--line)" } }), t("masked: read, not trained on"))),
    one.shown.map(example)));
}

function figures(one) {
  const cell = (label, value) => h("div", {}, h("dt", {}, t(label)), h("dd", {}, value));
  const share = one.tokens ? `${Math.round((100 * one.trained_tokens) / one.tokens)} %` : "–";
  const dropped = Object.values(one.dropped).reduce((sum, n) => sum + n, 0);
  return h("dl.figures", { style: { marginBottom: "14px" } }, cell(one.all_rows ? "Rows" : "First rows", integer(one.rows)), cell("Tokens", integer(one.tokens)), cell("Trained on", share),
    cell("Truncated", integer(one.cut)), cell("Dropped", integer(dropped)), cell("Unreadable", integer(one.broken.length)));
}

function problems(one) {
  const said = Object.entries(one.dropped).map(([why, n]) => t("{n} dropped: {why}", { n, why }));
  said.push(...one.broken.slice(0, 10));
  if (one.unread.length) said.push(t("columns that nothing reads: {names}", { names: one.unread.join(", ") }));
  return said.length ? h("div.note.warn", { style: { marginBottom: "14px" } }, said.join("\n")) : null;
}

export function lengths(values, cutoff) {
  if (!values.length) return null;
  const longest = values.at(-1), count = 40;
  const width = Math.max(1, Math.ceil((longest + 1) / count));
  const bins = Array.from({ length: Math.ceil((longest + 1) / width) }, () => 0);
  values.forEach((v) => { bins[Math.floor(v / width)] += 1; });
  const most = Math.max(...bins);
  const middle = values[Math.floor(values.length / 2)], high = values[Math.floor((values.length * 95 - 1) / 100)] ?? longest;
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
  const cell = (label, value) => h("div", {}, h("dt", {}, t(label)), h("dd", {}, value));
  const fits = capacity ? used <= capacity : null;
  return h("div.panel", {}, h("h2", {}, t("Plan")),
    h("dl.figures", { style: { marginBottom: "14px" } }, cell("Parameters", number(found.parameters, 3)), cell("Trainable", `${number((100 * found.trained_parameters) / found.parameters, 3)} %`),
      cell("Steps", integer(found.steps)), cell("Tokens", integer(found.tokens)), cell("Time", found.seconds ? duration(found.seconds) : t("unknown")), cell("Disk for checkpoints", bytes(found.checkpoint?.disk))),
    found.not_known ? h("div.note.warn", {}, t("Activations are not known: {why}", { why: found.not_known })) : null,
    h("p", { style: { margin: "0 0 6px" } }, t("Memory of a process at its peak: {size}", { size: bytes(used) }), capacity ? h("b", { style: { color: fits ? "var(--green)" : "var(--red)" } }, ` ${t(fits ? "of {size}" : "more than the available {size}", { size: bytes(capacity) })}`) : ""),
    h("div.stackbar", { role: "img", "aria-label": t("Memory") }, PARTS.map((name, i) => h("i", { title: `${t(name)}: ${bytes(memory[name])}`, style: { width: `${(100 * (memory[name] || 0)) / total}%`, background: color(i) } }))),
    h("div.keys", {}, PARTS.filter((name) => memory[name]).map((name) => h("span", {}, h("i", { style: { background: color(PARTS.indexOf(name)) } }), `${t(name)} ${bytes(memory[name])}`))));
}
