// Checkpoints of a run, and what can be done with each. Every action shows its command.
import { get, post } from "./api.js";
import { to } from "./app.js";
import { ask, h, redraw, replace, table, toast } from "./dom.js";
import { bytes, moment, number } from "./format.js";
import { t } from "./i18n.js";
import { command } from "./preview.js";

export async function checkpoints(content, run, now) {
  const view = { chosen: [], all: [], pinned: new Set(), isBusy: false };
  const line = h("div");
  const actions = h("div.row.writes");
  const result = h("div.stack");
  const pruning = h("div.panel.writes"), listed = h("div");
  replace(content, h("div.panel", {}, h("h2", {}, t("Checkpoints")), line, actions), result, pruning);

  const isTraining = () => now().state === "running";

  async function load() {
    const answer = await get("api/checkpoints", { run });
    view.all = answer.checkpoints;
    view.pinned = new Set(answer.pinned);
    view.chosen = view.chosen.filter((name) => view.all.some((c) => c.path === name));
    if (!view.chosen.length && view.all.length) view.chosen = [view.all.at(-1).path];
    if (answer.problem) replace(result, h("div.note.bad", {}, answer.problem));
    draw();
  }

  const state = (c) => [c.is_being_written ? t("being saved") : null, c.problem ? t("damaged") : null, c.is_best ? t("best") : null,
    c === view.all.filter((one) => one.step !== null && !one.problem).at(-1) ? t("latest") : null, view.pinned.has(c.step) ? t("pinned") : null,
    c.verified === "every byte" ? t("verified") : null].filter(Boolean);

  function draw() {
    if (!view.all.length) { replace(line, h("p.soft", {}, t("No checkpoint has been saved yet."))); replace(actions); pruning.hidden = true; return; }
    pruning.hidden = false;
    const box = (c) => h("input", { type: "checkbox", "aria-label": t("Select {name}", { name: c.path }), checked: view.chosen.includes(c.path), onchange: () => choose(c.path) });
    redraw(line, table([[""], [t("Checkpoint"), "whole"], [t("Saved"), "soft whole"], [t("Size"), "num"], [t("Loss"), "num"], [t("Eval loss"), "num"], [t("State"), "state"]],
      view.all.map((c) => [box(c), c.path, moment(c.created ? Date.parse(c.created) / 1000 : null), bytes(c.num_bytes), number(c.loss), number(c.eval_loss),
        [state(c).join(", ") || t("complete"), c.problem ? h("div.soft.small", {}, c.problem) : null]])));
    buttons();
  }

  function choose(name) {
    view.chosen = view.chosen.includes(name) ? view.chosen.filter((one) => one !== name) : [...view.chosen, name].slice(-2);
    draw();
  }

  function buttons() {
    const found = view.all.filter((c) => view.chosen.includes(c.path));
    const [one, other] = found;
    if (!one) { replace(actions, h("span.soft", {}, t("Select one checkpoint, or two to compare."))); return; }
    const isPinned = view.pinned.has(one.step);
    // listeners are of these checkpoints, so others need other buttons
    const act = (label, call, key = label) => h("button", { disabled: view.isBusy, "data-key": key, "data-of": view.chosen.join(), onclick: call }, t(label));
    redraw(actions, h("b", {}, found.map((c) => c.path).join(" → ")), found.length === 2 ? act("Compare", () => diff(one, other)) : [
      act("Verify", () => started({ command: "verify", checkpoint: one.path }, verified)),
      one.step !== null ? act(isPinned ? "Unpin" : "Pin", () => pin(one, !isPinned), "Pin") : null,
      act("Export", () => exported(one)),
      h("a.button", { href: to("chat", { run, a: one.path, b: "base" }) }, t("Chat beside the base model")),
      h("a.button", { href: to("new", { run, checkpoint: one.path }) }, t("New run from here"))]);
  }

  async function started(body, show) {
    view.isBusy = true;
    buttons();
    const panel = h("div.panel");
    replace(result, panel);
    const job = await command(panel, post("api/checkpoints", { run, ...body }), show);
    view.isBusy = false;
    buttons();
    return job;
  }

  const verified = (found) => found.ok
    ? h("div.note", {}, `✓ ${t("Verified: {what}.", { what: found.checked })}`)
    : h("div.note.bad", {}, (found.problems || []).join("\n"));

  const diff = (one, other) => started({ command: "diff", checkpoint: one.path, other: other.path }, (found) => {
    const changed = (found.tensors || []).filter((x) => x.verdict !== "equal").sort((x, y) => (y.relative ?? 9) - (x.relative ?? 9));
    return [h("p", {}, t("{n} of {all} tensors differ.", { n: changed.length, all: (found.tensors || []).length })),
      table([[t("Tensor")], [""], [t("Relative"), "num"], ["max |B−A|", "num"]], changed.slice(0, 40).map((x) => [x.name, t(x.verdict), number(x.relative), number(x.max_absolute)]), "table.diff")];
  });

  async function pin(one, isPinned) {
    try {
      view.pinned = new Set((await post("api/pin", { run, step: one.step, is_pinned: isPinned })).pinned);
      replace(listed); // a dry run of other pins
      draw();
    } catch (error) { toast(error.message); }
  }

  function exported(one) {
    const out = prompt(t("Name of the new folder, below the board's folder:"), `exports/${run.replaceAll("/", "-")}-${one.step}`);
    if (out) started({ command: "export", checkpoint: one.path, out }, () => h("div.note", {}, `✓ ${t("Exported to {out}.", { out })}`));
  }

  // Deleting comes after a dry run, and only of what it has listed.
  function pruner() {
    const field = (name, label) => [h("label.soft", { for: `p-${name}` }, t(label)), h("input", { id: `p-${name}`, type: "number", min: 1, style: { width: "84px" } })];
    const keeps = () => Object.fromEntries(["keep", "keep_every", "keep_best"].map((name) => [name, Number(pruning.querySelector(`#p-${name}`).value) || null]));
    const dry = h("button", { onclick: async () => {
      const chosen = keeps();
      const job = await started({ command: "prune-plan", ...chosen }, () => "");
      replace(listed);
      if (!job?.result) return;
      const going = job.result.checkpoints.filter((c) => !c.stays);
      replace(result);
      const remove = h("button.danger", { disabled: isTraining(), onclick: async () => {
        if (!await ask(t("Delete {n} checkpoints", { n: going.length }), t("Delete"), t("Cancel"))) return;
        const done = await started({ command: "prune", ...chosen }, (r) => h("div.note", {}, `✓ ${t("Freed {size}.", { size: bytes(r.freed_bytes) })}`));
        replace(listed);
        if (done) await load();
      } }, t("Delete {n} checkpoints", { n: going.length }));
      replace(listed, h("div.command", { style: { margin: "12px 0" } }, h("code", { tabindex: 0 }, job.command)),
        table([[""], ["", "num"], [""], ["", "soft"]], job.result.checkpoints.map((c) => [c.path.split("/").at(-1), bytes(c.num_bytes),
          h("span", { style: { color: c.stays ? "var(--green)" : "var(--red)" } }, t(c.stays ? "keep" : "delete")), (c.why || []).join(", ")])),
        h("div.row.between", { style: { marginTop: "12px" } }, h("span.soft", {}, t("Frees {size}.", { size: bytes(job.result.freed_bytes) }), isTraining() ? ` ${t("A run that trains deletes old checkpoints itself.")}` : ""), going.length ? remove : null));
    } }, t("Dry run"));
    replace(pruning, h("h2", {}, t("Delete old checkpoints")), h("p.soft", { style: { marginTop: 0 } }, t("The latest, the best and pinned checkpoints always stay. Empty fields are as the recipe says.")),
      h("div.row", {}, field("keep", "the latest"), field("keep_every", "every … steps"), field("keep_best", "the best"), dry), listed);
  }

  pruner();
  await load();
  const timer = setInterval(() => { if (isTraining() && !view.isBusy) load().catch(() => {}); }, 5000);
  return { changed: () => { replace(listed); load().catch(() => {}); }, close: () => clearInterval(timer) };
}
