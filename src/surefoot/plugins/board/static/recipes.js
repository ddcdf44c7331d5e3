// Two recipes beside each other.
import { get } from "./api.js";
import { h } from "./dom.js";
import { t } from "./i18n.js";

// A table of the settings in which the recipes of two runs differ.
export async function recipesOf(a, b) {
  try {
    const { changes } = await get("/api/diff", { a, b });
    const rows = changes.map((c) => h("tr", {}, h("td", {}, c.path), h("td.old", {}, JSON.stringify(c.old)), h("td.new", {}, JSON.stringify(c.new))));
    if (!rows.length) return h("div.panel", {}, h("h2", {}, t("Recipes")), h("p.soft", {}, t("Both recipes are equal.")));
    return h("div.panel", {}, h("h2", {}, t(rows.length === 1 ? "Recipes differ in one setting" : "Recipes differ in {n} settings", { n: rows.length })),
      h("div.scroll", { tabindex: 0 }, h("table.diff", {}, h("thead", {}, h("tr", {}, h("th", {}, t("Setting")), h("th", {}, a), h("th", {}, b))), h("tbody", {}, rows))));
  } catch (error) {
    return h("div.note.bad", {}, error.message);
  }
}
