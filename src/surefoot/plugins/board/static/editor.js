// A plain text area with line numbers; lines with problems are marked as one types.
import { h, replace } from "./dom.js";
import { t } from "./i18n.js";

export function editor(changed) {
  const gutter = h("div.gutter", { "aria-hidden": "true" });
  const area = h("textarea", { spellcheck: "false", autocapitalize: "off", autocomplete: "off", wrap: "off", "aria-label": t("Recipe in YAML") });
  const list = h("ul.problems", { "aria-live": "polite" });
  let problems = [];
  const draw = () => {
    const marked = new Map(problems.filter((p) => p.line).map((p) => [p.line, p.message]));
    const count = area.value.split("\n").length;
    replace(gutter, Array.from({ length: count }, (_, i) => h("div", { class: marked.has(i + 1) ? "bad" : "", title: marked.get(i + 1) }, i + 1)));
    gutter.scrollTop = area.scrollTop;
  };
  area.addEventListener("scroll", () => { gutter.scrollTop = area.scrollTop; });
  area.addEventListener("input", () => { draw(); changed(area.value); });
  const go = (problem) => {
    if (!problem.line) return;
    const lines = area.value.split("\n");
    const start = lines.slice(0, problem.line - 1).reduce((sum, line) => sum + line.length + 1, 0) + (problem.column || 1) - 1;
    area.focus();
    area.setSelectionRange(start, start);
    area.scrollTop = Math.max(0, (problem.line - 8) * 20);
  };
  return {
    element: h("div", {}, h("div.yaml", {}, gutter, area), list),
    area,
    get value() { return area.value; },
    set value(text) {
      if (text === area.value) return;
      const [start, top] = [area.selectionStart, area.scrollTop];
      area.value = text;
      area.setSelectionRange(start, start);
      area.scrollTop = top;
      draw();
    },
    problems(found) {
      problems = found;
      draw();
      replace(list, found.map((p) => h("li", {}, h("button", { onclick: () => go(p) }, p.line ? `${t("line {n}", { n: p.line })}: ` : "", p.message))));
    },
  };
}
