// English and Chinese. The English text is the key; the Chinese ones are fetched when they are used.
let ZH = {};

// Keys that are no English text.
const NAMES = {
  "state:not_started": "did not start",
  "finish:length": "(truncated at the longest answer)",
  "finish:context": "(truncated: the context length is reached)",
};

export const language = () => {
  const chosen = localStorage.getItem("language");
  return chosen || (navigator.language.startsWith("zh") ? "zh" : "en");
};
export const loaded = async () => { if (language() === "zh") ({ ZH } = await import("./zh.js")); };
export const setLanguage = (name) => { localStorage.setItem("language", name); return loaded(); };

export function t(key, values = {}) {
  const text = (language() === "zh" && ZH[key]) || NAMES[key] || key.replace(/^state:/, "");
  return text.replace(/\{(\w+)\}/g, (_, name) => values[name] ?? "");
}
