// The state of a run, always with the evidence for it.
import { h } from "./dom.js";
import { duration } from "./format.js";
import { t } from "./i18n.js";

export const badge = (run) => h(`span.badge.${run.state}`, { title: evidence(run) }, t(`state:${run.state}`));

export function evidence(run) {
  const said = [t(`evidence:${run.evidence}`)];
  const end = run.end || {};
  if (run.state === "stopped" && end.signal) said.push(t("It was stopped by {signal} and has saved.", { signal: end.signal }));
  if (run.state === "died") said.push(t("Start it again to resume from its latest valid checkpoint."));
  if (run.state === "unknown" && run.silent_seconds !== null) said.push(t("Last heartbeat {time} ago.", { time: duration(run.silent_seconds) }));
  if (run.is_stalled) said.push(t("No step for {time}.", { time: duration(run.silent_seconds) }));
  return said.join(" ");
}
