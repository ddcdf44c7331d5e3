"""The page of a GPU: tables written from the JSON lines into RESULTS.md, between two markers.

Tiny runs and those of a CPU are not on it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import correct
import page_heads
import results
from cases import GOALS, ORDER, TITLES
from results import Record
from sizes import peak_of

RESULTS = results.FOLDER.parent / "RESULTS.md"
START, END = "<!-- gpu: written by `kit.py page` -->", "<!-- gpu: end -->"
NOTHING = "Not measured yet: no GPU was at hand."
TOLERANCE = 2e-3  # of first losses, relative: bfloat16
SAME_BATCHES = ("surefoot", "surefoot-fast", "trainer-padded", "trainer-liger")
Figures = dict[tuple[str, str], Mapping[str, Any]]  # by case and subject


def write(records: Sequence[Record], path: Path = RESULTS) -> None:
    """Replace what is between the markers by the tables of all GPUs."""
    text = path.read_text(encoding="utf-8")
    head, start, rest = text.partition(START)
    _, end, foot = rest.partition(END)
    if not start or not end:
        raise SystemExit(f"{path}: expected the lines {START} and {END}, found not both")
    shown = [r for r in records if r["kind"] == "cuda" and not r["tiny"]]
    path.write_text(f"{head}{START}\n\n{render(shown)}\n\n{END}{foot}", encoding="utf-8")


def render(records: Sequence[Record]) -> str:
    """The tables of every device."""
    devices: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        devices[str(record["device"])].append(record)
    return "\n\n".join(_device(name, found) for name, found in devices.items()) or NOTHING


def _device(name: str, records: Sequence[Record]) -> str:
    """All tables of one device."""
    found = list(results.latest(records).values())
    parts = [f"#### {name}", _header(found)]
    for part, show in (
        ("correct", _correct),
        ("suite", _suite),
        ("speed", _speed),
        ("save", _save),
    ):
        parts += show([r for r in found if r["part"] == part])
    parts += _profile([r for r in found if r["part"] == "profile"])
    return "\n\n".join(parts)


def _header(records: Sequence[Record]) -> str:
    dates = sorted(str(r["date"])[:10] for r in records)
    between = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    versions: dict[str, str] = {}
    for record in records:
        versions |= record["versions"]  # type: ignore[arg-type]
    commits = ", ".join(dict.fromkeys(str(r["commit"]) for r in records))
    listed = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"{between}; {listed}; commit {commits}."


def _correct(records: Sequence[Record]) -> list[str]:
    if not records:
        return []
    count = Counter(str(r["status"]) for r in records)
    total = ", ".join(f"{number} {status}" for status, number in sorted(count.items()))
    lines = [f"Tests marked `gpu`: {total}.", *_failures(records)]
    reasons = Counter(_last_line(r) for r in records if r["status"] == "skipped")
    lines += [f"- {number} skipped: {reason}" for reason, number in reasons.items()]
    return [lines[0], *(["\n".join(lines[1:])] if lines[1:] else [])]


def _suite(records: Sequence[Record]) -> list[str]:
    counts: list[Any] = [r["figures"] for r in records if r["case"] == correct.ALL]
    if not counts:
        return []
    total = ", ".join(f"{number:,} {status}" for status, number in sorted(counts[-1].items()))
    return [f"`make test` on this device: {total}.", *filter(None, ["\n".join(_failures(records))])]


def _failures(records: Sequence[Record]) -> list[str]:
    return [
        f"- {record['status']}: `{record['case']}`: {_last_line(record)}"
        for record in records
        if record["status"] not in ("ok", "skipped")
    ]


def _last_line(record: Record) -> str:
    lines = str(record["error"]).strip().splitlines()
    return lines[-1][:200] if lines else ""


def _speed(records: Sequence[Record]) -> list[str]:
    """A table of each task, and the longest prompts of pairs."""
    if not records:
        return []
    found: Figures = {(str(r["case"]), str(r["subject"])): r["figures"] for r in records}  # type: ignore[misc]
    status = {(str(r["case"]), str(r["subject"])): r for r in records}
    limits = found.get(("limits", "limits"), {})
    peak = limits.get("tflops", 0.0)
    parts = []
    if limits:
        parts.append(
            f"A product of random matrices in bf16 reaches {peak:,.3g} TFLOP/s; a copy in memory "
            f"{limits['copy_gb_s']:,.0f} GB/s, read and written."
        )
    if sheet := peak_of(str(records[0]["device"])):
        parts.append(f"MFU is the share of {sheet:,.4g} TFLOP/s, bf16 by the data sheet.")
    for work in dict.fromkeys(name for name, _ in ORDER):
        subjects = [name for name in TITLES if (work, name) in status]
        if subjects:
            rows = [_row(status[work, name], found, peak) for name in subjects]
            parts += [f"**{work}**", _table(_head(work), rows), *_unequal(work, found)]
            parts += [f"Goal on an H100: {GOALS[work]}."] if work in GOALS else []
    parts += _reach(records)
    for title, head, rows in page_heads.tables(records):
        parts += [f"**{title}**, forward and backward", _table(head, rows)]
    return [*parts, *_without_result(records)]


def _without_result(records: Sequence[Record]) -> list[str]:
    """Cases that are in no table, by their status."""
    known = {name for name, _ in ORDER}
    return [
        f"{record['case']}: {record['status']}: {_last_line(record)}"
        for record in records
        if record["status"] != "ok"
        and record["case"] not in known
        and not str(record["subject"]).startswith("head-")
    ]


def _head(work: str) -> list[str]:
    rate = "pairs a second" if work.startswith("dpo") else "tokens a second"
    head = ["", rate, "times Surefoot's", "TFLOP/s", "MFU %", "% of a product's"]
    return [*head, "peak GB", "first loss"]


def _rate(figures: Mapping[str, Any], work: str) -> float:
    return figures["examples" if work.startswith("dpo") else "tokens"] / figures["wall"]


def _row(record: Record, found: Figures, peak: float) -> list[str]:
    """One subject of one task."""
    work, subject = str(record["case"]), str(record["subject"])
    figures = found[work, subject]
    if record["status"] != "ok":
        return [TITLES[subject], str(record["status"]), *[""] * 6]
    rate, own = _rate(figures, work), found.get((work, "surefoot"), {})
    reached = rate * figures.get("operations", 0) / 1e12
    return [
        TITLES[subject],
        f"{rate:,.2f}" if work.startswith("dpo") else f"{rate:,.0f}",
        f"{rate / _rate(own, work):.2f}" if own else "",
        f"{reached:,.0f}" if reached else "",
        _percent(reached, peak_of(str(record["device"]))),
        _percent(reached, peak),
        f"{figures['peak_mb'] / 1024:,.1f}",
        f"{figures['losses'][0]:.4f}",
    ]


def _percent(reached: float, peak: float | None) -> str:
    return f"{100 * reached / peak:.1f}" if reached and peak else ""


def _unequal(work: str, found: Figures) -> list[str]:
    """A line on first losses that differ though the batches are the same."""
    own = found.get((work, "surefoot"), {}).get("losses")
    differ = []
    for subject in SAME_BATCHES:
        losses = found.get((work, subject), {}).get("losses")
        if own and losses and abs(losses[0] / own[0] - 1) > TOLERANCE:
            differ.append(TITLES[subject])
    return [f"**First losses differ**: {', '.join(differ)}."] if differ else []


def _reach(records: Sequence[Record]) -> list[str]:
    """The longest prompts of preference pairs that fit."""
    longest: dict[str, dict[str, int]] = defaultdict(dict)
    for record in records:
        task, _, length = str(record["case"]).partition(", prompts of ")
        if length and record["status"] == "ok":
            found, subject = longest[task], str(record["subject"])
            found[subject] = max(found.get(subject, 0), int(length.removesuffix("k")))
    parts = []
    for task, found in longest.items():
        listed = ", ".join(f"{TITLES[name]} {length}k" for name, length in found.items())
        parts.append(f"Longest prompts that ran, {task}: {listed} tokens.")
    return parts


def _save(records: Sequence[Record]) -> list[str]:
    """A table of saves, and the limits."""
    if not records:
        return []
    head = ["", "state GB", "step s", "stall s", "steps slower %", "committed after s"]
    head += ["load s", "restored after s", "first step after s"]
    names = ["state_gb", "step_s", "stall_s", "slower_percent", "committed_after_s"]
    names += ["load_s", "restored_after_s", "first_step_after_s"]
    rows, limits = [], {}
    for record in records:
        figures: Mapping[str, float] = record["figures"]  # type: ignore[assignment]
        title = f"{record['case']}, {TITLES[str(record['subject'])]}"
        if record["case"] == "limits":
            limits = figures
        elif record["status"] == "ok":
            cells = [f"{figures[n]:,.2f}" if n in figures else "" for n in names]
            rows.append([title, *cells])
        else:
            rows.append([title, str(record["status"]), *[""] * 7])
    parts = ["Saves of a full run, in the background; restored and first step are counted from"]
    parts[0] += " the start of a new process."
    if limits:
        pinned = limits.get("to_pinned_gb_s")
        shown = f"{pinned:.1f} GB/s to pinned memory, " if pinned else ""
        parts.append(
            f"Limits: {shown}{limits['to_pageable_gb_s']:.1f} GB/s to pageable memory, "
            f"{limits['to_disk_gb_s']:.2f} GB/s to the disk, flushed."
        )
    return [*parts, *([_table(head, rows)] if rows else [])]


def _profile(records: Sequence[Record]) -> list[str]:
    """The kernels of a step, and what the host does."""
    parts: list[str] = []
    for record in records:
        figures: Mapping[str, Any] = record["figures"]  # type: ignore[assignment]
        if record["status"] != "ok":
            parts.append(f"Profile of {record['case']}: {record['status']}.")
            continue
        host = ", ".join(f"{phase} {ms:.1f}" for phase, ms in figures["host_ms"].items())
        number = f"{figures['gaps_a_step']:,.0f}"
        parts.append(
            f"**Profile of {record['case']}**: a step of {figures['plain_step_ms']:,.1f} ms alone, "
            f"of {figures['step_ms']:,.1f} ms with the profiler, {figures['kernels_a_step']:,.0f} "
            f"kernels; idle {figures['idle_percent']:.1f} % in {number} gaps; host, ms: {host}."
        )
        parts += _shares(record, figures)
        rows = [
            [
                f"`{kernel['name']}`",
                f"{kernel['ms_a_step']:,.2f}",
                f"{kernel['percent']:.1f}",
                f"{kernel['calls_a_step']:,.0f}",
            ]
            for kernel in figures["kernels"]
        ]
        parts.append(_table(["kernel", "ms a step", "% of all kernels", "calls a step"], rows))
        gaps = [[f"{g['ms']:.2f}", f"`{g['after']}`", f"`{g['before']}`"] for g in _long(figures)]
        if gaps:
            parts.append(_table(["longest gaps, ms", "after", "before"], gaps))
    return parts


def _shares(record: Record, figures: Mapping[str, Any]) -> list[str]:
    """Where the time of a step goes: what its operations need, and what comes on top of it."""
    kinds: dict[str, float] = dict(figures["kinds_ms"])
    parts = []
    if "operations" in figures:
        work = figures["operations"] * figures["tokens_a_step"]
        ideal = 1e3 * work / (figures["gemm_tflops"] * 1e12)
        reached = 1e3 * work / figures["plain_step_ms"] / 1e12
        products = kinds.pop("products", 0.0) + kinds.pop("attention", 0.0)
        sheet = peak_of(str(record["device"]))
        mfu = f", MFU {_percent(reached, sheet)} % of {sheet:,.4g}" if sheet else ""
        parts.append(
            f"It reaches {reached:,.3g} TFLOP/s{mfu}, {_percent(reached, figures['gemm_tflops'])} "
            f"% of the {figures['gemm_tflops']:,.3g} of a product. Its operations would take "
            f"{ideal:,.1f} ms at that rate; products and attention take "
            f"{products - ideal:,.1f} ms more. ({figures['formula']}.)"
        )
    listed = ", ".join(f"{kind} {ms:,.1f}" for kind, ms in kinds.items())
    parts.append(f"Other kernels, ms: {listed}. Idle, ms: {figures['idle_ms']:,.1f}.")
    if figures["waits"]:
        waits = (
            f"`{w['name']}` {w['calls_a_step']:,.1f}, {w['ms_a_step']:,.1f} ms"
            for w in figures["waits"]
        )
        parts.append(f"The host waits, calls a step: {'; '.join(waits)}.")
    return parts


def _long(figures: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [gap for gap in figures["longest_gaps"] if gap["ms"] >= 0.05]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
