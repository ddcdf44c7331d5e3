// Data: rows as the model sees them, with the mask; lengths; what is dropped, and why.
import { get, post } from "./api.js";
import { to } from "./app.js";
import { h, replace } from "./dom.js";
import { t } from "./i18n.js";
import { run as command } from "./job.js";
import { checked, datasets } from "./preview.js";

export async function page(body, query) {
  const [{ files }, { runs }] = await Promise.all([get("/api/recipes"), get("/api/runs")]);
  const chosen = query.run ? `run:${query.run}` : query.file ? `file:${query.file}` : "";
  const answer = h("div");
  const select = h("select", { "aria-label": t("Recipe"), onchange: (e) => {
    const [kind, ...rest] = e.target.value.split(":");
    location.hash = to("data", kind ? { [kind]: rest.join(":") } : {});
  } }, h("option", { value: "" }, t("Choose a recipe or run …")),
  h("optgroup", { label: t("Recipes") }, files.map((f) => h("option", { value: `file:${f}`, selected: chosen === `file:${f}` }, f))),
  h("optgroup", { label: t("Runs") }, runs.map((r) => h("option", { value: `run:${r.run}`, selected: chosen === `run:${r.run}` }, r.run))));
  replace(body, h("div.row.between", {}, h("h1", {}, t("Data")), select),
    chosen ? null : h("div.empty", {}, t("Rows of a dataset as the model reads them: rendered by the chat template, with the tokens that are trained on.")), answer);
  if (!chosen) return null;
  const source = query.run ? { text: (await get("/api/run", { run: query.run })).recipe, file: `${query.run}/recipe.yaml` } : { text: (await get("/api/recipe", { file: query.file })).text, file: query.file };
  const report = h("div");
  const check = h("button", { onclick: async () => {
    check.disabled = true;
    await command(report, post("/api/try", { ...source, command: "check" }), checked);
    check.disabled = false;
  } }, t("Check all rows"));
  replace(answer, h("div.stack", {}, h("div.row", {}, check, h("span.soft.small", {}, t("Duplicates, overlap with evaluation data, empty or repeated responses, lengths: surefoot data check."))), report, h("div")));
  await command(answer.firstChild.lastChild, post("/api/try", { ...source, command: "preview", count: 24 }), datasets);
  return null;
}
