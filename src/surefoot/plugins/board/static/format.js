// Numbers, sizes and times as people read them.
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
  if (seconds < 60) return t("just now");
  if (seconds < 3600) return t("{n} min ago", { n: Math.floor(seconds / 60) });
  if (seconds < 86400) return t("{n} h ago", { n: Math.floor(seconds / 3600) });
  return new Date(time * 1000).toLocaleDateString(language());
}

export const moment = (time) => (time ? new Date(time * 1000).toLocaleString(language(), { dateStyle: "medium", timeStyle: "medium" }) : NONE);
