// The state of a run, always with the evidence for it.
import { h } from "./dom.js";
import { ago, duration } from "./format.js";
import { t } from "./i18n.js";

// A run that has not taken its first step is not what its process is: there is nothing to resume or to talk to.
export const stateOf = (run) => (run.has_begun === false ? (run.state === "running" ? "starting" : "not_started") : run.state);
export const badge = (run) => h(`span.badge.${stateOf(run)}`, { title: evidence(run) }, t(`state:${stateOf(run)}`));

export function evidence(run) {
  if (stateOf(run) === "starting") return t("evidence:starting");
  if (stateOf(run) === "not_started") return t("evidence:not_begun");
  const end = run.end || {};
  const said = run.evidence === "end" && end.time ? [t("Ended {time}.", { time: ago(end.time) })] : [t(`evidence:${run.evidence}`)];
  if (run.state === "stopped" && end.signal) said.push(t("It was stopped by {signal} and has saved.", { signal: end.signal }));
  if (run.state === "died") said.push(t("Start it again to resume from its latest valid checkpoint."));
  if (run.state === "unknown" && run.silent_seconds !== null) said.push(t("Last heartbeat {time} ago.", { time: duration(run.silent_seconds) }));
  if (run.is_stalled) said.push(t("No step for {time}.", { time: duration(run.silent_seconds) }));
  return said.join(" ");
}
