// A new run: a form beside its YAML, problems as one types, plan and preview before the start.
import { get, post } from "./api.js";
import { to } from "./app.js";
import { h, later, replace, toast } from "./dom.js";
import { editor } from "./editor.js";
import { form } from "./form.js";
import { t } from "./i18n.js";
import { checked as checkedRows, command, datasets, plan } from "./preview.js";

const EMPTY = `model:
  path: Qwen/Qwen3-0.6B
data:
  datasets: [tatsu-lab/alpaca]
method:
  lora: {rank: 16}
stage: sft
train:
  output_dir: runs/first
  num_epochs: 1
  global_batch_size: 16
  micro_batch_size: auto
optim:
  adamw: {learning_rate: 2.0e-4}
checkpoint: {save_steps: 100}
`;
const DRAFT = "draft";

export async function page(body, query) {
  const [schema, { recipes, models, data }] = await Promise.all([get("api/schema"), get("api/materials")]);
  let checked = { problems: [], data: {}, output_dir: null }, number = 0, file = "";
  const text = editor(() => { save(); check(); });
  const fields = form(schema, change);
  const name = h("input", { type: "text", "aria-label": t("File of the recipe"), style: { width: "100%" }, spellcheck: "false", oninput: () => { file = name.value; save(); check(); told(); } });
  const start = h("button.primary", { onclick: begin }, t("Start training"));
  const shown = h("code", { tabindex: 0 });
  const fate = h("span.soft");
  const tried = { plan: h("div"), check: h("div"), preview: h("div") };

  const keep = later(200, () => localStorage.setItem(DRAFT, JSON.stringify({ text: text.value, file })));
  const save = () => { if (!query.run && !query.file) keep(); };
  const look = later(250, async () => {
    const mine = ++number;
    try {
      const found = await post("api/check", { text: text.value, file: file || "recipe.yaml" });
      if (mine === number) show(found);
    } catch (error) { if (mine === number) toast(error.message); }
  });
  const check = () => { start.disabled = true; look(); };

  function show(found) {
    checked = found;
    text.problems(found.problems);
    fields.show(found.data, found.problems);
    told();
  }

  function told() {
    const wrong = checked.problems.length;
    start.disabled = Boolean(wrong) || !file;
    shown.textContent = `surefoot train ${file || "…"}`;
    fate.textContent = wrong ? t("Problems: {n}", { n: wrong }) : checked.output_dir ? t(checked.is_begun ? "The run in {folder} exists: it is resumed." : "The run will be in {folder}.", { folder: checked.output_dir }) : "";
    fate.style.color = wrong ? "var(--red)" : "";
  }

  async function change(keys, value) {
    const mine = ++number;
    look.cancel();
    try {
      const found = await post("api/edit", { text: text.value, file: file || "recipe.yaml", keys, value });
      if (mine !== number) return;
      text.value = found.text;
      show(found);
      save();
    } catch (error) { toast(error.message); }
  }

  const attempt = (kind, draw) => () => command(tried[kind], post("api/try", { text: text.value, file: file || "recipe.yaml", command: kind, count: 6 }), draw);

  async function begin() {
    start.disabled = true;
    try {
      const found = await post("api/start", { text: text.value, file });
      localStorage.removeItem(DRAFT);
      keep.cancel();
      await until(found.run);
      location.hash = to("run", { run: found.run, tab: "log" });
    } catch (error) { toast(error.message); told(); }
  }

  async function until(run) {
    for (let i = 0; i < 20; i += 1) {
      try { await get("api/run", { run }); return; } catch { await new Promise((resolve) => setTimeout(resolve, 300)); }
    }
  }

  const from = h("select", { "aria-label": t("Begin with a file …"), onchange: (e) => { location.hash = to("new", { file: e.target.value }); } },
    h("option", { value: "" }, t("Begin with a file …")), recipes.map((one) => h("option", { value: one, selected: one === query.file }, one)));
  // What everyone sets first, from what there is; a model of a hub, or several files, are typed below.
  const choose = (label, all, chosen) => (all.length ? h("label.row.soft.small", {}, t(label), h("select", { onchange: (e) => { if (e.target.value) chosen(e.target.value); } },
    h("option", { value: "" }, t("Choose …")), all.map((one) => h("option", { value: one }, one)))) : null);
  const search = h("input", { type: "search", placeholder: t("Search all settings"), "aria-label": t("Search all settings"), style: { width: "100%" }, oninput: (e) => fields.search(e.target.value) });
  await begun();
  replace(body, h("div.row.between", {}, h("h1", {}, t("New run")), from),
    query.checkpoint ? h("div.note", {}, t("It resumes from {checkpoint} of {run}, in a folder of its own.", { checkpoint: query.checkpoint, run: query.run })) : null,
    h("div.row", {}, choose("Model", models, (one) => change(["model", "path"], one)), choose("File of rows", data, (one) => change(["data", "datasets"], [one]))),
    models.length && data.length ? null : h("p.soft.small", {}, t("Models and files of rows in and below the folder of the board are listed here. Where none lie, start the board a folder higher, or write paths or names of a hub, which are downloaded.")),
    h("div.two", {}, h("div", {}, h("div", { style: { marginBottom: "8px" } }, search), fields.element), h("div", {}, h("div", { style: { marginBottom: "8px" } }, name), text.element)),
    h("div.row", {}, h("button", { onclick: attempt("plan", plan) }, t("Plan: steps, memory, disk")), h("button", { onclick: attempt("preview", datasets) }, t("Preview: what is trained on")),
      h("button", { title: t("Duplicates, overlap with evaluation data, empty or repeated responses, lengths: surefoot data check."), onclick: attempt("check", checkedRows) }, t("Check all rows"))),
    tried.plan, tried.check, tried.preview,
    h("div.panel", {}, h("div.row", {}, h("div.grow.command", {}, shown), start), h("p.small", { style: { margin: "8px 2px 0" } }, fate,
      h("span.soft", {}, ` ${t("Training is a process of its own: you may close this page and the board.")}`))));

  check();

  // What the page starts with: a run, a file, the draft of last time, or an example.
  async function begun() {
    if (query.run) {
      const { recipe } = await get("api/run", { run: query.run });
      const fresh = `${query.run}-${query.checkpoint ? query.checkpoint.replace("checkpoint-", "from-") : "2"}`;
      let found = { text: recipe };
      const edits = [[["train", "output_dir"], fresh], [["checkpoint", "resume"], query.checkpoint ? `${query.run}/${query.checkpoint}` : "auto"]];
      for (const [keys, value] of edits) found = await post("api/edit", { text: found.text, file: "recipe.yaml", keys, value });
      file = `recipes/${fresh.replaceAll("/", "-")}.yaml`;
      text.value = found.text;
    } else if (query.file) {
      text.value = (await get("api/recipe", { file: query.file })).text;
      file = query.file;
    } else {
      const draft = JSON.parse(localStorage.getItem(DRAFT) || "null");
      text.value = draft?.text || EMPTY;
      file = draft?.file || "recipes/first.yaml";
    }
    name.value = file;
  }
  return () => { look.cancel(); };
}
