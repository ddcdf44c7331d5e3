// The frame: navigation, language, theme, and the page that the address names.
import { address, get } from "./api.js";
import { h, redraw, replace } from "./dom.js";
import { language, loaded, setLanguage, t } from "./i18n.js";

const PAGES = {
  runs: { title: "Runs", load: () => import("./runs.js") },
  run: { title: "Run", load: () => import("./run.js") },
  new: { title: "New run", load: () => import("./new.js") },
  chat: { title: "Chat", load: () => import("./chat.js") },
};
const MENU = ["runs", "new", "chat"];
const SHOWN = ["runs"]; // of a read-only board, which starts nothing
let close = () => {};
let shown = 0;
let board = {};

export function here() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  return { page: PAGES[path] ? path : "runs", query: Object.fromEntries(new URLSearchParams(query || "")) };
}

export const to = (page, query) => address(`#/${page}`, query);

function frame(current) {
  const theme = document.documentElement.dataset.theme;
  const skip = document.querySelector("a.skip");
  skip.textContent = t("Skip to content");
  skip.onclick = (event) => { event.preventDefault(); document.getElementById("main").focus(); }; // the address names a page
  redraw(document.getElementById("top"),
    h("a.brand", { href: "#/runs" }, "Surefoot"),
    h("nav", { "aria-label": t("Pages") }, (board.is_read_only ? SHOWN : MENU).map((name) => h("a", {
      href: to(name), "aria-current": name === current || (name === "runs" && current === "run") ? "page" : null,
    }, t(PAGES[name].title)))),
    h("button.quiet", { "data-key": "language", onclick: async () => { await setLanguage(language() === "zh" ? "en" : "zh"); show(); }, lang: language() === "zh" ? "en" : "zh" }, language() === "zh" ? "English" : "中文 (Chinese)"),
    h("button.quiet", {
      "data-key": "theme", role: "switch", "aria-label": t("Dark theme"), "aria-checked": String(theme === "dark"),
      onclick: () => {
        const next = theme === "dark" ? "light" : "dark";
        localStorage.setItem("theme", next);
        document.documentElement.dataset.theme = next;
        show();
      },
    }, theme === "dark" ? "☀" : "☾"));
}

async function show() {
  const { page, query } = here();
  const number = ++shown;
  close();
  close = () => {};
  frame(page);
  document.documentElement.lang = language();
  document.title = `${t(PAGES[page].title)}${query.run ? ` · ${query.run}` : ""} · Surefoot`;
  const main = document.getElementById("main");
  const body = h("div.stack");
  replace(main, body);
  try {
    const module = await PAGES[page].load();
    const closing = await module.page(body, query);
    if (number === shown) close = closing || (() => {});
    else closing?.();
    if (number === shown && number > 1 && document.activeElement === document.body) main.focus({ preventScroll: true }); // what was in focus is gone
  } catch (error) {
    if (number === shown) replace(body, h("div.note.bad", { role: "alert" }, error.message));
  }
}

addEventListener("hashchange", show);
addEventListener("keydown", (event) => {
  const inField = /^(INPUT|TEXTAREA|SELECT)$/.test(document.activeElement?.tagName);
  if (inField && event.key === "Escape") document.activeElement.blur();
  if (inField || document.querySelector("dialog") || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "/") {
    const search = document.querySelector("input[type=search]");
    if (search) { event.preventDefault(); search.focus(); }
  }
  const place = (board.is_read_only ? SHOWN : MENU)[event.key - 1];
  if (place) location.hash = to(place);
});
Promise.all([loaded(), get("api/board").then((found) => { board = found; }).catch(() => {})]).then(() => {
  if (board.is_read_only) document.documentElement.dataset.readOnly = "";
  show();
});
