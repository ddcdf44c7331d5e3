// Chat: one or two models side by side, with the same seed; probabilities of tokens on hover.
import { get, post, stream } from "./api.js";
import { h, redraw, replace } from "./dom.js";
import { t } from "./i18n.js";

const THOUGHT = /^\s*<think>[^]*?(<\/think>|$)|^[^]*?<\/think>/; // its beginning may be in the prompt

export async function page(body, query) {
  const runs = (await get("api/runs")).runs.filter((run) => run.has_begun);
  const sides = [{ run: query.run || runs[0]?.run || "", checkpoint: query.a || "", messages: [] }, { run: query.b ? query.run : "", checkpoint: query.b || "", messages: [] }];
  let isBusy = false, abort = null;
  const known = new Map();
  const tip = h("div.tip", { role: "tooltip", hidden: true });
  document.getElementById("main").append(tip);
  if (!runs.length) { replace(body, h("h1", {}, t("Chat")), h("div.empty", {}, t("There is no run to talk to yet."))); return () => tip.remove(); }

  const field = (label, attributes) => h("label.row.soft.small", {}, t(label), h("input", { type: "number", style: { width: "92px" }, "aria-label": t(label), ...attributes }));
  const seed = field("Seed", { value: 1, step: 1 }), heat = field("Temperature", { value: 0, min: 0, step: 0.1 }), most = field("Longest answer", { value: 200, min: 1 });
  const value = (box) => { const text = box.querySelector("input").value; return text === "" ? null : Number(text); };
  const system = h("input", { type: "text", placeholder: t("System message (optional)"), "aria-label": t("System message (optional)"), style: { width: "100%" } });
  const tools = h("textarea.code", { rows: 5, spellcheck: "false", placeholder: '[{"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}]', "aria-label": t("Tools: a JSON list of function schemas") });
  const input = h("textarea", { rows: 3, placeholder: t("Write a message. Enter sends, Shift+Enter breaks the line."), "aria-label": t("Message"), onkeydown: (e) => { if (e.key === "Enter" && !e.shiftKey && !e.isComposing) { e.preventDefault(); send(); } } });
  const sendButton = h("button.primary", { onclick: () => send() }, t("Send"));
  const grid = h("div.chat");
  await draw();
  replace(body, h("div.row.between", {}, h("h1", {}, t("Chat")), h("div.row", {}, h("button", { onclick: () => { if (isBusy) return; sides.forEach((s) => { s.messages = []; }); asked(); draw(); } }, t("New conversation")), h("button.quiet", { onclick: () => post("api/chat/close") }, t("Free memory")))),
    grid, h("div.panel", {}, h("div.row", { style: { marginBottom: "10px" } }, seed, heat, most, h("div.grow", {}, system)), h("details", { style: { marginBottom: "10px" } }, h("summary.soft.small", {}, t("Tools: a JSON list of function schemas")), tools), input,
      h("div.row.between", { style: { marginTop: "8px" } }, h("span.soft.small", {}, t("Both sides get the same message and the same seed. Hover or focus a token for its probability.")), sendButton)));

  async function checkpointsOf(run) {
    if (run && !known.has(run)) known.set(run, (await get("api/checkpoints", { run })).checkpoints.filter((c) => !c.problem && c.step !== null).map((c) => c.path));
    return known.get(run) || [];
  }

  async function head(side, place) {
    const pick = h("select", { "aria-label": t("Run"), onchange: (e) => { side.run = e.target.value; side.checkpoint = ""; side.messages = place && sides[0].messages.length ? [] : side.messages; draw(); } },
      place ? h("option", { value: "" }, t("no second model")) : null, runs.map((r) => h("option", { value: r.run, selected: r.run === side.run }, r.run)));
    const names = await checkpointsOf(side.run);
    const which = h("select", { "aria-label": t("Checkpoint"), hidden: !side.run, onchange: (e) => { side.checkpoint = e.target.value; } },
      h("option", { value: "" }, t("best or latest")), [...names].reverse().map((n) => h("option", { value: n, selected: n === side.checkpoint }, n)), h("option", { value: "base", selected: side.checkpoint === "base" }, t("base model")));
    return [pick, which];
  }

  async function draw() {
    const heads = await Promise.all(sides.map(head));
    grid.className = `chat${sides[1].run ? " sides" : ""}`;
    for (const [place, side] of sides.entries()) {
      side.head ||= h("div.row", { style: { marginBottom: "12px" } });
      side.box ||= h("div.messages", { "aria-live": "polite" });
      redraw(side.head, heads[place]);
      if (!isBusy) replace(side.box, side.messages.map(bubble)); // an answer that is on its way stays
    }
    if (!grid.children.length) replace(grid, sides.map((side, place) => h("section.panel", { "aria-label": place ? "B" : "A", style: { margin: 0 } }, side.head, side.box)));
  }

  function bubble(message) {
    if (message.role === "user") return h("div.bubble.user", {}, message.content);
    if (message.role === "tool") return h("div.bubble.user", {}, h("div.soft.small", {}, t("result of the call")), h("span.mono", {}, message.content));
    const length = message.content.match(THOUGHT)?.[0].length || 0;
    const parts = [[], []]; // what the model thought, and its answer
    let at = 0;
    for (const one of message.tokens?.length ? message.tokens : [{ text: message.content }]) {
      parts[at < length ? 0 : 1].push(one.instead ? token(one, at === 0) : one.text);
      at += one.text.length;
    }
    return [length ? h("div.bubble.thought", {}, parts[0]) : null,
      (message.calls || []).map((call) => h("div.bubble.call", {}, h("span.soft.small", {}, `${t("tool call")} `), h("code", {}, `${call.name}(${JSON.stringify(call.arguments)})`))),
      (message.broken || []).map((text) => h("div.note.warn", {}, `${t("a tool call that cannot be read")}: ${text}`)),
      h("div.bubble", {}, parts[1], message.note ? h("div.soft.small", {}, message.note) : null)].flat().filter(Boolean);
  }

  // One tab stop for an answer; the arrow keys lead from token to token.
  function token(one, isFirst) {
    const p = one.probability;
    const level = p === null || p > 0.9 ? "" : p > 0.5 ? "p1" : p > 0.1 ? "p2" : "p3";
    const show = (e) => {
      const box = e.target.getBoundingClientRect();
      tip.textContent = [`p = ${p === null ? "?" : p.toPrecision(3)}`, ...one.instead.map(([text, share]) => `${share === null ? "?" : share.toFixed(3)}  ${JSON.stringify(text)}`)].join("\n");
      tip.hidden = false;
      Object.assign(tip.style, { left: `${Math.min(box.left, innerWidth - 300)}px`, top: `${box.bottom + 6 + 130 > innerHeight ? box.top - 136 : box.bottom + 6}px` });
    };
    return h("span.tok", { class: level, tabindex: isFirst ? 0 : -1, onkeydown: (e) => {
      const next = { ArrowRight: e.target.nextElementSibling, ArrowLeft: e.target.previousElementSibling }[e.key];
      if (next) { e.preventDefault(); next.focus(); }
    }, onmouseenter: show, onfocus: show, onmouseleave: () => { tip.hidden = true; }, onblur: () => { tip.hidden = true; } }, one.text);
  }

  async function send() {
    if (isBusy) { abort?.abort(); return; }
    const text = input.value.trim();
    if (!text) return;
    input.value = "";
    isBusy = true;
    sendButton.textContent = t("Stop");
    abort = new AbortController();
    await Promise.all(sides.filter((side) => side.run).map((side) => ask(side, text)));
    isBusy = false;
    sendButton.textContent = t("Send");
    asked();
  }

  // After a call of a tool, what is written next is its result.
  function asked() {
    const isResult = sides.some((side) => side.messages.at(-1)?.calls?.length);
    input.placeholder = isResult ? t("The result of the tool call.") : t("Write a message. Enter sends, Shift+Enter breaks the line.");
  }

  async function ask(side, text) {
    const before = side.messages.map(({ role, content }) => ({ role, content }));
    const said = { role: side.messages.at(-1)?.calls?.length ? "tool" : "user", content: text };
    side.messages.push(said);
    const answer = { role: "assistant", content: "" };
    const box = h("div.bubble", {}, h("span.soft", {}, "…"));
    side.box.append(bubble(side.messages.at(-1)), box);
    const wrong = (why) => { side.messages.pop(); box.className = "note bad"; box.textContent = why; };
    const request = { run: side.run, checkpoint: side.checkpoint, messages: [...before, said], system: system.value || null, tools: tools.value.trim() || null, seed: value(seed), temperature: value(heat), max_new_tokens: value(most) };
    try {
      await stream("api/chat", request, (event) => {
        if (event.event === "opening") replace(box, h("span.soft", {}, t("Opening the model …")));
        if (event.event === "piece") { answer.content += event.text; box.textContent = answer.content; }
        if (event.event === "error") wrong(event.message);
        if (event.event === "answer") {
          answer.content = event.text;
          Object.assign(answer, { tokens: event.tokens, calls: event.tool_calls, broken: event.broken_calls });
          answer.note = event.finish_reason === "stop" ? null : t(`finish:${event.finish_reason}`);
          side.messages.push(answer);
          box.replaceWith(...[bubble(answer)].flat());
        }
      }, abort.signal);
    } catch (error) { wrong(error.name === "AbortError" ? t("state:stopped") : error.message); }
  }

  input.focus({ preventScroll: true });
  return () => { abort?.abort(); tip.remove(); };
}
