// A form of all settings, made from the JSON schema of recipes. It changes the YAML, never the reverse.
import { h, marked, redraw } from "./dom.js";
import { t } from "./i18n.js";

const isSection = (schema) => schema.properties !== undefined;
const named = (schema) => schema.anyOf?.find((one) => one.maxProperties === 1 && one.properties);

export function form(schema, change) {
  const box = h("div.form", { role: "group", "aria-label": t("Settings") });
  const opened = new Set(["model", "data", "method", "train"]);
  let data = {}, words = "", bad = new Map();

  const at = (keys) => keys.reduce((found, key) => (found && typeof found === "object" ? found[key] : undefined), data);
  const matches = (path, field) => !words || path.toLowerCase().includes(words) || (field.description || "").toLowerCase().includes(words);

  function draw() {
    const top = box.scrollTop;
    redraw(box, Object.entries(schema.properties).map(([name, field]) => section(name, field)));
    box.scrollTop = top;
  }

  function section(name, field) {
    const choice = named(field);
    const fields = choice ? variants(name, field, choice) : settings([name], field);
    if (!fields.length) return null;
    const value = data?.[name];
    const count = value && typeof value === "object" ? Object.keys(choice ? Object.values(value)[0] || {} : value).length : value === undefined ? 0 : 1;
    const toggled = ({ target }) => { if (!words) opened[target.open ? "add" : "delete"](target.dataset.name); };
    const details = h("details", { open: Boolean(words) || opened.has(name), "data-name": name, ontoggle: toggled },
      h("summary", {}, name, h("small", {}, count ? t("{n} set", { n: count }) : "")), fields);
    return details;
  }

  function variants(name, field, choice) {
    const value = data?.[name];
    const chosen = typeof value === "string" ? value : value && typeof value === "object" ? Object.keys(value)[0] : "";
    const select = h("select", { id: `f-${name}`, onchange: (e) => change([name], e.target.value || null) },
      h("option", { value: "" }, field.default ? t("default: {value}", { value: typeof field.default === "string" ? field.default : Object.keys(field.default)[0] }) : "–"),
      Object.keys(choice.properties).map((one) => h("option", { value: one, selected: one === chosen }, one)));
    const first = h("div.field", { class: value === undefined ? "" : "set" }, h("label", { for: `f-${name}` }, name), select, h("p", {}, marked(choice.properties[chosen]?.description || field.description)));
    const below = choice.properties[chosen] ? settings([name, chosen], choice.properties[chosen]) : [];
    return matches(name, field) || below.length ? [first, ...below] : [];
  }

  const settings = (keys, schema) => Object.entries(schema.properties || {}).flatMap(([name, field]) => {
    const path = [...keys, name];
    if (isSection(field)) return settings(path, field);
    return matches(path.join("."), field) ? [one(path, field)] : [];
  });

  function one(keys, field) {
    const value = at(keys);
    const id = `f-${keys.join(".")}`;
    const problem = bad.get(keys.join("."));
    return h("div.field", { class: [value === undefined ? "" : "set", problem ? "bad" : ""].join(" ") }, h("label", { for: id }, keys.at(-1)), control(id, keys, field, value),
      h("p", {}, problem ? h("span", { style: { color: "var(--red)" } }, problem) : marked(field.description)));
  }

  function control(id, keys, field, value) {
    const kinds = field.anyOf ? field.anyOf : [field];
    const options = kinds.flatMap((kind) => kind.enum || []);
    const isFlag = kinds.some((kind) => kind.type === "boolean");
    const isOnly = kinds.every((kind) => kind.enum || kind.type === "null" || kind.type === "boolean");
    const usual = field.default === undefined || field.default === null ? "" : typeof field.default === "string" ? field.default : JSON.stringify(field.default);
    if (isOnly && (options.length || isFlag)) {
      const all = [...new Set([...options, ...(isFlag ? [true, false] : [])].map(String))];
      return h("select", { id, onchange: (e) => change(keys, e.target.value === "" ? null : typed(e.target.value)) },
        h("option", { value: "" }, usual ? t("default: {value}", { value: usual }) : "–"), all.map((name) => h("option", { value: name, selected: value !== undefined && String(value) === name }, name)));
    }
    const shown = value === undefined || value === null ? "" : typeof value === "string" ? value : JSON.stringify(value);
    const isText = kinds.some((kind) => kind.type === "string");
    return h("input", { id, type: "text", value: shown, placeholder: usual, spellcheck: "false", autocomplete: "off", onchange: (e) => {
      const text = e.target.value.trim();
      change(keys, text === "" ? null : isText && !/^[[{]/.test(text) ? text : typed(text));
    } });
  }

  function typed(text) {
    if (text === "true" || text === "false") return text === "true";
    if (text !== "" && /^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i.test(text)) return Number(text);
    try { return JSON.parse(text); } catch { return text.startsWith("[") ? text.slice(1, -1).split(",").map((s) => s.trim()).filter(Boolean) : text; }
  }

  return {
    element: box,
    search(text) { words = text.toLowerCase().trim(); draw(); },
    show(now, problems) {
      data = now && typeof now === "object" ? now : {};
      bad = new Map(problems.flatMap((p) => { const found = p.message.match(/^([\w.]+): ([^]*)$/); return found ? [[found[1], found[2]]] : []; }));
      draw();
    },
  };
}
