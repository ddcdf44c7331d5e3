// Sweeps: the list of them.
import { get } from "./api.js";
import { to } from "./app.js";
import { h, redraw, replace } from "./dom.js";
import { integer, number } from "./format.js";
import { t } from "./i18n.js";
import { badge } from "./state.js";

const EVERY = 3000;
export const COMMAND = "surefoot sweep recipe.yaml optim.adamw.learning_rate=1e-5..1e-3:log method.lora.rank=8,16,32 --trials 20";

export const tally = (counts) => Object.entries(counts).map(([name, n]) => `${n} ${t(`trial:${name}`)}`).join(" · ");

export async function page(body) {
  let isOpen = true, timer = 0;
  const list = h("div.panel.flush");
  const note = h("div");
  replace(body, h("h1", {}, t("Sweeps")), note, list);

  const line = (one) => h("tr", {}, h("td.name", {}, h("a", { href: to("sweep", { sweep: one.sweep }) }, one.sweep), h("small", {}, one.keys.join(" · "))),
    h("td.state", {}, badge(one)),
    h("td.num", { "data-label": t("Trials") }, integer(Object.values(one.counts).reduce((a, b) => a + b, 0)), one.requested ? h("span.soft", {}, ` / ${integer(one.requested)}`) : ""),
    h("td.num", { "data-label": one.objective.metric || t("Best") }, number(one.best)),
    h("td.counts", {}, one.problem ? h("span.bad", {}, one.problem) : tally(one.counts)));

  async function refresh() {
    clearTimeout(timer);
    try {
      if (!document.hidden || !list.children.length) {
        const { root, sweeps, is_cut: isCut } = await get("/api/sweeps");
        if (!isOpen) return;
        replace(note);
        if (!sweeps.length) replace(list, h("div.empty", {}, t("No sweeps below {root} yet.", { root }), h("br"), h("code.wrapped", {}, COMMAND)));
        else {
          redraw(list, h("div.scroll", { tabindex: 0 }, h("table.runs.sweeps", {}, h("thead", {}, h("tr", {}, h("th", {}, t("Sweep")), h("th", {}, t("State")), h("th.num", {}, t("Trials")), h("th.num", {}, t("Best")), h("th", {}, t("Results")))), h("tbody", {}, sweeps.map(line)))),
            isCut ? h("div.note", {}, t("There may be more sweeps: the search ended at its limit.")) : null);
        }
      }
    } catch (error) {
      if (isOpen) replace(note, h("div.note.bad", { role: "alert" }, t("The board does not answer: {why}", { why: error.message })));
    }
    if (isOpen) timer = setTimeout(refresh, EVERY);
  }

  await refresh();
  return () => { isOpen = false; clearTimeout(timer); };
}
