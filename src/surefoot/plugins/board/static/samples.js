// What a run has generated: answers to the same prompts over time, and rollouts with rewards.
import { get } from "./api.js";
import { h, replace } from "./dom.js";
import { integer, number } from "./format.js";
import { t } from "./i18n.js";

const LEVELS = [[0.01, ""], [0.1, "p2"], [Infinity, "p3"]];

export async function samples(content, run, details) {
  const files = details.samples;
  if (!files.length) {
    replace(content, h("div.empty", {}, t("This run has kept no samples."), h("br"), t("Stages that sample keep some at every evaluation; this command answers held-out prompts:"), h("br"), h("code", {}, `surefoot eval ${run}`)));
    return {};
  }
  const answered = files.filter((f) => f.kind === "generations");
  const rollouts = files.filter((f) => f.kind === "rollouts");
  const parts = [];
  if (answered.length) parts.push(await overTime(run, answered));
  if (rollouts.length) parts.push(await sampled(run, rollouts));
  replace(content, parts);
  return {};
}

// One prompt, and the answer of each evaluated checkpoint to it.
async function overTime(run, files) {
  const found = await Promise.all(files.map(async (file) => ({ file, ...(await get("api/samples", { run, file: file.name })) })));
  const prompts = new Map();
  for (const { file, rows } of found) {
    for (const row of rows) {
      const known = prompts.get(row.origin) || { prompt: row.prompt, reference: row.reference, pictures: [row.pictures || []].flat(), answers: [] };
      known.answers.push({ label: file.label, answer: row.answer, match: row.match });
      prompts.set(row.origin, known);
    }
  }
  const broken = found.reduce((sum, one) => sum + one.broken, 0);
  return h("div.panel", {}, h("h2", {}, t("Answers to held-out prompts")), broken ? h("div.note.warn", {}, t("{n} lines cannot be read.", { n: broken })) : null,
    [...prompts].slice(0, 24).map(([origin, one]) => h("div", { style: { borderTop: "1px solid var(--line)", padding: "12px 0" } },
      h("div.soft.small", {}, origin), h("div.mask", {}, one.prompt),
      one.pictures.filter((src) => String(src).startsWith("data:image/")).map((src) => h("img", { src, alt: "", style: { margin: "6px 6px 0 0" } })),
      one.reference ? h("p", { style: { margin: "6px 0" } }, h("b.small", {}, `${t("expected")}: `), h("span.mono", {}, one.reference)) : null,
      one.answers.map((a) => h("p", { style: { margin: "4px 0" } }, h("b.small", { style: { color: a.match === false ? "var(--red)" : "var(--green)" } }, `${a.match === false ? "✗" : a.match ? "✓" : ""} ${a.label}: `), h("span.mono", {}, a.answer))))));
}

async function sampled(run, files) {
  const list = h("div");
  const select = h("select", { "aria-label": t("Step"), onchange: (e) => show(e.target.value) }, files.map((f) => h("option", { value: f.name, selected: f === files.at(-1) }, `${t("Step")} ${integer(f.step)}`)));
  async function show(name) {
    const { rows, broken } = await get("api/samples", { run, file: name });
    replace(list, broken ? h("div.note.warn", {}, t("{n} lines cannot be read.", { n: broken })) : null, rows.map((row) => h("div", { style: { borderTop: "1px solid var(--line)", padding: "12px 0" } },
      h("div.row.between", {}, h("span.soft.small", {}, row.origin), h("span.small", {}, t("reward {r}, advantage {a}", { r: number(row.reward), a: number(row.advantage) }), ` · ${row.stop_reason}`)),
      h("div.mask", {}, row.prompt), h("div.bubble", { style: { marginTop: "8px" } }, (row.tokens || []).map(token))))); 
  }
  await show(files.at(-1).name);
  return h("div.panel", {}, h("div.row.between", {}, h("h2", { style: { margin: 0 } }, t("Sampled responses")), select),
    h("p.soft.small", {}, t("Marked tokens: the trained model's probability is more than 1 % or 10 % from the sampled one.")), list);
}

function token(one) {
  if (one.sampled === null || one.trained === null) return h("span.soft", {}, one.text);
  const apart = Math.abs(one.trained - one.sampled);
  const level = LEVELS.find(([limit]) => !(apart > limit))[1];
  return h("span.tok", { class: level, title: `p = ${Math.exp(one.sampled).toPrecision(3)} → ${Math.exp(one.trained).toPrecision(3)}` }, one.text);
}
