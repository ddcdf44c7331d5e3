// English and Chinese. The English text is the key; the Chinese ones are fetched when they are used.
let ZH = {};

const NAMES = {
  "state:running": "running", "state:complete": "complete", "state:stopped": "stopped", "state:failed": "failed",
  "state:died": "died", "state:ended": "ended", "state:unknown": "unknown", "state:gone": "gone",
  "evidence:lock": "A process holds the lock of the run's folder.",
  "evidence:starting": "Its process is alive, and has not begun to train yet.",
  "evidence:not_begun": "Its process ended before training began; the log says why.",
  "evidence:process": "Its process is alive on this machine.",
  "evidence:end": "The last launch recorded its end.",
  "evidence:no_end": "No process holds the lock, and the last launch never recorded an end: it was killed, or the machine went down.",
  "evidence:no_process": "Its process is gone, and it never recorded an end.",
  "evidence:store": "The store has no record of its end, and no process of this machine trains it, so nobody knows here.",
  "evidence:results": "It wrote its results after the last step.",
  "evidence:no_record": "No process holds the lock. There is no record of how it ended.",
  "evidence:sweep_lock": "A process holds the lock of the sweep's folder.",
  "evidence:sweep_done": "All of its trials have ended.",
  "evidence:sweep_left": "No process runs this sweep, and trials are left. The same command resumes it.",
  "trial:complete": "complete", "trial:pruned": "pruned", "trial:failed": "failed", "trial:half-run": "half-run",
  "finish:length": "(truncated at the longest answer)",
  "finish:context": "(truncated: the context length is reached)",
  "evidence:no_locks": "This file system has no locks, and the process is on another machine, so nobody knows here.",
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
