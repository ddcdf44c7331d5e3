// The report of `surefoot data check`: findings first, then the figures of each dataset.
import { h } from "./dom.js";
import { integer, NONE } from "./format.js";
import { t } from "./i18n.js";
import { lengths } from "./preview.js";

const LABELS = {
  broken: "Unreadable", cut: "Truncated", equal: "Equal to an earlier row", similar: "Similar to an earlier row",
};
const OVERLAPS = { same: "the same row", prompt: "the same prompt", similar: "similar" };
const percent = (share) => `${Number((100 * share).toPrecision(3))} %`;
const places = (rows) => (rows.length ? `(${rows.join(", ")} …)` : "");

export function checked(found) {
  const findings = found.findings.map((one) => h("li", {},
    h("b", { style: { color: one.level === "problem" ? "var(--red)" : "var(--amber)" } }, t(one.level === "problem" ? "problem" : "note")),
    ` ${one.dataset}: ${integer(one.count)} ${one.what} `, h("span.soft", {}, places(one.rows)), one.advice ? h("div.soft", {}, one.advice) : null));
  return h("div.panel", {}, h("h2", {}, t("Check of all rows")),
    found.ok ? h("div.note", {}, `✓ ${t("No problems.")}`) : null,
    findings.length ? h("ul", { style: { margin: "12px 0", paddingLeft: "20px" } }, findings) : null,
    found.overlaps.map((one) => h("p", {}, t("{name}: rows of the evaluation data that are in the training data", { name: one.evaluation }), ": ",
      Object.entries(OVERLAPS).map(([key, label]) => `${t(label)} ${integer(one[key].count)}`).join(" · "))),
    found.datasets.map((one) => figures(one, found.cutoff_len)));
}

function figures(one, cutoff) {
  const counts = Object.entries(LABELS).map(([name, label]) => [t(label), one[name]]);
  const dropped = Object.entries(one.dropped).map(([why, c]) => [t("dropped: {why}", { why }), c]);
  const odd = Object.entries(one.odd);
  const rows = [...counts, ...dropped, ...odd].filter(([, c]) => c.count).map(([label, c]) => [label, integer(c.count), places(c.rows)]);
  rows.push(...one.repeated.map((r) => [t("The same response"), integer(r.count), `${JSON.stringify(r.text)} (${r.row} …)`]));
  const all = Object.entries(one.lengths).flatMap(([length, n]) => Array.from({ length: Math.min(n, 20000) }, () => Number(length)));
  const cell = (label, value) => h("div", {}, h("dt", {}, t(label)), h("dd", {}, value));
  return h("section", { style: { marginTop: "18px" } }, h("h3", {}, one.name),
    h("dl.figures", { style: { margin: "8px 0 14px" } }, cell("Rows", integer(one.rows)), cell("Tokens", integer(one.tokens)), cell("Trained on", one.tokens ? percent(one.share_trained) : NONE)),
    lengths(all, cutoff),
    rows.length ? h("div.scroll", { tabindex: 0 }, h("table", {}, h("tbody", {}, rows.map(([label, n, where]) => h("tr", {}, h("td", {}, label), h("td.num", {}, n), h("td.soft", {}, where)))))) : null,
    one.unread.length ? h("p.soft.small", {}, t("columns that nothing reads: {names}", { names: one.unread.join(", ") })) : null);
}
