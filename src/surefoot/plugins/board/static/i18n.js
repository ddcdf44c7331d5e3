// English and Chinese. The English text is the key; the Chinese ones are fetched when they are used.
let ZH = {};

const NAMES = {
  "state:running": "running", "state:complete": "complete", "state:stopped": "stopped", "state:failed": "failed",
  "state:died": "died", "state:ended": "ended", "state:unknown": "unknown", "state:gone": "gone", "state:starting": "starting", "state:not_started": "did not start",
  "evidence:lock": "It is training.",
  "evidence:starting": "It is opening the model and the data, which takes seconds to minutes.",
  "evidence:not_begun": "It ended before its first step.",
  "evidence:process": "It is training on this machine.",
  "evidence:end": "It has ended.",
  "evidence:no_end": "It was killed, or the machine went down.",
  "evidence:no_process": "It was killed, or the machine went down.",
  "evidence:no_record": "There is no record of how it ended.",
  "finish:length": "(truncated at the longest answer)",
  "finish:context": "(truncated: the context length is reached)",
  "evidence:no_locks": "It was started on another machine, and this one cannot see whether it still runs.",
};

export const language = () => {
  const chosen = localStorage.getItem("language");
  return chosen || (navigator.language.startsWith("zh") ? "zh" : "en");
};
export const loaded = async () => { if (language() === "zh") ({ ZH } = await import("./zh.js")); };
export const setLanguage = (name) => { localStorage.setItem("language", name); return loaded(); };

export function t(key, values = {}) {
  const text = (language() === "zh" && ZH[key]) || NAMES[key] || key;
  return text.replace(/\{(\w+)\}/g, (_, name) => values[name] ?? "");
}
