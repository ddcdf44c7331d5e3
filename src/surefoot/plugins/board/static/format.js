// Numbers, sizes, times, and the state of a run with the evidence for it, as people read them.
import { h } from "./dom.js";
import { language, t } from "./i18n.js";

export const NONE = "–";

export function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return NONE;
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2).replace("e+", "e");
  return value.toLocaleString(language(), { maximumSignificantDigits: digits });
}

export const integer = (value) => (value === null || value === undefined ? NONE : Math.round(value).toLocaleString(language()));

export function bytes(value) {
  if (value === null || value === undefined) return NONE;
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let place = 0;
  while (value >= 999.5 && place < units.length - 1) { value /= 1000; place += 1; }
  return `${place ? value.toPrecision(3) : value} ${units[place]}`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return NONE;
  const whole = Math.round(seconds);
  const [days, hours, minutes] = [Math.floor(whole / 86400), Math.floor(whole / 3600) % 24, Math.floor(whole / 60) % 60];
  const two = (n) => String(n).padStart(2, "0");
  if (days) return `${days} d ${hours} h`;
  if (hours) return `${hours}:${two(minutes)}:${two(whole % 60)}`;
  return `${minutes}:${two(whole % 60)}`;
}

export function ago(time) {
  if (!time) return NONE;
  const seconds = Math.max(0, Date.now() / 1000 - time);
  if (seconds >= 86400) return new Date(time * 1000).toLocaleDateString(language());
  const [count, unit] = seconds < 3600 ? [seconds / 60, "minute"] : [seconds / 3600, "hour"];
  return new Intl.RelativeTimeFormat(language(), { style: "short", numeric: "auto" }).format(-Math.floor(count), unit);
}

export const moment = (time) => (time ? new Date(time * 1000).toLocaleString(language(), { dateStyle: "medium", timeStyle: "medium" }) : NONE);

// A run that has not taken its first step is not what its process is: there is nothing to resume or to talk to.
export const stateOf = (run) => (run.has_begun === false ? (run.state === "running" ? "starting" : "not_started") : run.state);
export const badge = (run) => h(`span.badge.${stateOf(run)}`, { title: evidence(run) }, t(`state:${stateOf(run)}`));

export function evidence(run) {
  if (stateOf(run) === "starting") return t("It is opening the model and the data, which takes seconds to minutes.");
  if (stateOf(run) === "not_started") return t("It ended before its first step.");
  const end = run.end || {};
  const said = run.evidence === "end" && end.time ? [t("Ended {time}.", { time: ago(end.time) })] : [t(run.because)];
  if (run.state === "stopped" && end.signal) said.push(t("It was stopped by {signal} and has saved.", { signal: end.signal }));
  if (run.state === "died") said.push(t("Start it again to resume from its latest valid checkpoint."));
  if (run.state === "unknown" && run.silent_seconds !== null) said.push(t("Last heartbeat {time} ago.", { time: duration(run.silent_seconds) }));
  if (run.is_stalled) said.push(t("No step for {time}.", { time: duration(run.silent_seconds) }));
  return said.join(" ");
}
