"""What is to be looked at in a recipe's data: odd rows, and figures beyond a threshold.

A problem sets the exit code of ``surefoot data check``; a note does not.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Literal

from ...data.example import Example, Message
from ...data.section import DataSection
from ...errors import counted
from .duplicates import Overlap, response_of
from .figures import DatasetFigures


@dataclass(frozen=True)
class Finding:
    """Something to look at."""

    level: Literal["problem", "note"]
    dataset: str
    what: str
    count: int
    rows: Sequence[str] = ()  # some of them
    advice: str = ""

    def __str__(self) -> str:
        rows = f" ({'; '.join(self.rows)})" if self.rows else ""
        advice = f". {self.advice[:1].upper()}{self.advice[1:]}" if self.advice else ""
        return f"{self.what}: {self.count:,}{rows}{advice}"


# Shares of a dataset's rows up to which equal and truncated ones are only noted.
FEW_EQUAL, FEW_CUT = 0.01, 0.05
FEW_TRAINED = 0.01  # share of the tokens below which a dataset hardly trains
MOST_REPEATED = 0.1  # share of the rows that may have one response
LONG = 20  # characters from which a repeated response is a problem: shorter ones may be labels
UNBALANCED = 0.1  # share of the rarer label


def findings_of(
    section: DataSection, datasets: Sequence[DatasetFigures], overlaps: Sequence[Overlap]
) -> list[Finding]:
    """Everything to look at, problems first."""
    findings = [finding for figures in datasets for finding in findings_in(figures)]
    for name in section.datasets:
        if name in section.eval_datasets:
            what = "datasets that are used for training and for evaluation"
            advice = "its evaluation does not measure generalization"
            findings.append(Finding("problem", str(name), what, 1, (), advice))
    advice = "remove them from one of the two: they are not new to the model"
    for overlap in overlaps:
        problem = partial(Finding, "problem", overlap.evaluation)
        if (same := overlap.same).count:
            what = "rows that are also in the training data"
            findings.append(problem(what, same.count, same.rows, advice))
        if (prompt := overlap.prompt).count:
            what = "prompts that are also in the training data, with another response"
            findings.append(problem(what, prompt.count, prompt.rows, advice))
    return sorted(findings, key=lambda finding: finding.level != "problem")


LONGER = "raise data.cutoff_len, and model.max_positions if the model has fewer"


def findings_in(figures: DatasetFigures) -> Iterator[Finding]:
    """What to look at in one dataset: its rows, their lengths and responses, then remarks."""
    problem = partial(Finding, "problem", figures.name)
    note = partial(Finding, "note", figures.name)

    for kind, odd in figures.odd.items():
        yield problem(kind, odd.count, odd.rows, ODD_ADVICE[kind])
    if bad := figures.bad_pictures:
        advice = "restore or convert the files, or remove the rows; each of them stops training"
        yield problem("pictures that cannot be read", len(bad), bad, advice)
    if (broken := figures.broken).count:
        most = figures.max_broken_rows
        stops = f": training stops at more than data.max_broken_rows = {most}"
        advice = f"fix them{stops if broken.count > most else ''}"
        yield problem("rows that cannot be read", broken.count, broken.rows, advice)
    for reason, dropped in figures.dropped.items():
        cure = LONGER if "cutoff_len" in reason else "fix or remove them"
        what = f"examples that are dropped: {reason}"
        yield problem(what, dropped.count, dropped.rows, cure)
    if (equal := figures.equal).count:
        advice = "rows that occur several times are trained on more often than the others"
        finding = problem if equal.count > FEW_EQUAL * figures.rows else note
        yield finding("rows equal to an earlier one", equal.count, equal.rows, advice)

    if (cut := figures.cut).count:
        advice = "raise data.cutoff_len, or set data.on_too_long: drop"
        finding = problem if cut.count > FEW_CUT * figures.rows else note
        yield finding("examples that are truncated to data.cutoff_len", cut.count, cut.rows, advice)
    if figures.items and figures.share_trained < FEW_TRAINED:
        what = f"trained tokens, {100 * figures.share_trained:.2g} % of all"
        advice = "most of the work is on prompts; are the responses in the right column?"
        yield problem(what, figures.trained_tokens, (), advice)
    if not figures.items:
        yield problem("rows, none of which is trained on", figures.rows)

    for repeated in figures.repeated:
        if repeated.count > MOST_REPEATED * figures.rows:
            what = f"rows with one response, {repeated.text!r}"
            finding = problem if len(repeated.text) >= LONG else note
            yield finding(what, repeated.count, (repeated.row,), "a model learns it by heart")
    labels = figures.labels
    if labels and min(labels[True], labels[False]) < UNBALANCED * labels.total():
        what = f"rows marked good, and {labels[False]:,} marked bad"
        advice = "weigh them with stage.kto.desirable_weight and undesirable_weight"
        yield note(what, labels[True], (), advice)

    for remark in figures.remarks:
        yield note(remark, figures.rows)
    for text, noted in figures.notes.items():
        yield note(text, noted.count, noted.rows)
    yield from _unread(figures)


def _unread(figures: DatasetFigures) -> Iterator[Finding]:
    """What nothing reads: keys, and marks in texts that stand for nothing."""
    lines = {k: f"{k}: {counted(r.count, 'row')}, {r.rows[0]}" for k, r in figures.unread.items()}
    if keys := [line for key, line in lines.items() if not key.startswith("<")]:
        advice = "name them in the entry if they are part of an example"
        yield Finding("note", figures.name, "keys that nothing reads", len(keys), keys, advice)
    if marks := [line for key, line in lines.items() if key.startswith("<")]:
        advice = "name the column of what they stand for, or remove them: they are read as text"
        yield Finding("problem", figures.name, "marks for nothing", len(marks), marks, advice)


NO_RESPONSE = "conversations that do not end with a response"
RESPONSE_FIRST = "conversations that begin with a response"
SAME_ROLE = "conversations with two turns of one role in a row"
NO_CALL = "results of functions without a call before"
SPECIAL_TOKENS = "special tokens of the model in the text"
LOOP = "responses that repeat themselves"
ECHO = "responses equal to the prompt"
ODD_ADVICE = {
    NO_RESPONSE: "add a response, or remove the rows: there is nothing to train on at their end",
    RESPONSE_FIRST: "the response has no prompt; check that no turn is missing",
    SAME_ROLE: "check for missing turns; most chat templates expect them to alternate",
    NO_CALL: "check for missing calls",
    SPECIAL_TOKENS: "is the text already rendered by a chat template? Give messages instead",
    LOOP: "a model imitates that; read some of them",
    ECHO: "check the columns of the entry",
}
LOOP_LENGTH, LOOP_RATIO = 400, 0.08  # bytes of a response, and its compressed size at most


def oddities(
    example: Example, special_tokens: Sequence[str], *, needs_response: bool
) -> Iterator[str]:
    """What is odd about a row: the order of its turns, its text and its response, as keys of
    ``ODD_ADVICE``. ``special_tokens`` are those of the model."""
    messages = example.messages
    texts = [message.content for message in messages] if messages else [example.text or ""]
    if any(mark in text for text in texts for mark in special_tokens):
        yield SPECIAL_TOKENS
    if example.text is not None or example.token_ids is not None:
        return
    ends_in_response = messages and messages[-1].role == "assistant"
    if needs_response and example.chosen is None and not ends_in_response:
        yield NO_RESPONSE
    yield from _odd_order(messages)
    if (response := response_of(example)) is None:
        return
    if is_loop(response.content):
        yield LOOP
    prompts = [message.content.strip() for message in messages if message.role == "user"]
    if response.content.strip() and prompts and prompts[-1] == response.content.strip():
        yield ECHO


def _odd_order(messages: Sequence[Message]) -> Iterator[str]:
    roles = [message.role for message in messages]
    turns = [role for role in roles if role != "system"]
    if turns and turns[0] == "assistant":
        yield RESPONSE_FIRST
    # Several results in a row answer several calls of one turn.
    if any(role == next_role != "tool" for role, next_role in pairwise(turns)):
        yield SAME_ROLE
    if any(
        role == "tool" and before not in ("assistant", "tool") for before, role in pairwise(roles)
    ):
        yield NO_CALL


def is_loop(text: str) -> bool:
    """Whether a text says the same again and again: it is long, and compresses to next to
    nothing."""
    data = text.encode(errors="replace")
    return len(data) >= LOOP_LENGTH and len(zlib.compress(data, 1)) < LOOP_RATIO * len(data)
