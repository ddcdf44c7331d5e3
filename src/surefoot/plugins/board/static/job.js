// A command that runs while one waits: what it is, how long it takes, and its answer or error.
import { finished, post } from "./api.js";
import { h, replace } from "./dom.js";
import { t } from "./i18n.js";

export async function run(panel, starting, show) {
  const seen = (job) => {
    const cancel = h("button.small", { onclick: () => post("/api/cancel", {}, { number: job.job }) }, t("Cancel"));
    replace(panel, h("div.command", {}, h("code", { tabindex: 0 }, job.command), job.code === null ? cancel : null),
      job.code === null ? h("p.soft", { role: "status", style: { margin: "10px 2px" } }, t("Running for {n} s …", { n: Math.round(job.seconds ?? 0) })) : null);
  };
  try {
    const job = await finished(await starting, seen);
    const isWrong = (job.result ?? null) === null && job.code !== 0;
    panel.append(h("div", { style: { marginTop: "14px" } }, isWrong ? h("div.note.bad", { role: "alert" }, (job.error || job.output || t("cancelled")).trim()) : show(job.result)));
    return job;
  } catch (error) {
    replace(panel, h("div.note.bad", { role: "alert" }, error.message));
    return null;
  }
}
