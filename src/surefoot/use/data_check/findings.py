"""What a check finds: a sentence for each thing to look at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...data.section import DataSection
from .conversations import ALONE, CONTROL, ECHO, FIRST, LATE, LOOP, NO_END, PLACEHOLDER, TWICE
from .figures import DatasetFigures, Finding, Level, Overlap

FEW_EQUAL, FEW_SIMILAR, FEW_CUT = 0.01, 0.05, 0.05  # shares up to which these are only noted
FEW_TRAINED = 0.01  # of the tokens, below which a dataset hardly trains
MOST_REPEATED, LONG = 0.1, 20  # share of rows with one response; its characters, if it is no label
UNBALANCED = 0.1  # share of the rarer label
ODD_ADVICE = {
    NO_END: "add a response, or remove the rows: there is nothing to train on at their end",
    FIRST: "the response has no prompt; check that no turn is missing",
    TWICE: "check for missing turns; most chat templates expect them to alternate",
    LATE: "most chat templates read a system message only at the beginning",
    ALONE: "check for missing calls",
    PLACEHOLDER: "pictures and sounds are not read; remove the rows or the placeholders",
    CONTROL: "is the text already rendered by a chat template? Give messages instead",
    LOOP: "a model imitates that; read some of them",
    ECHO: "check the columns of the entry",
}


def findings_of(
    section: DataSection, datasets: Sequence[DatasetFigures], overlaps: Sequence[Overlap]
) -> list[Finding]:
    """Everything to look at, problems first."""
    found = [finding for figures in datasets for finding in _of_dataset(figures)]
    for name in section.datasets:
        if name in section.eval_datasets:
            advice = "its evaluation does not measure generalization"
            found.append(Finding("problem", str(name), _BOTH, 1, (), advice))
    found += [finding for overlap in overlaps for finding in _of_overlap(overlap)]
    return sorted(found, key=lambda finding: finding.level != "problem")


_BOTH = "datasets that are used for training and for evaluation"


def _of_dataset(figures: DatasetFigures) -> Iterator[Finding]:
    rows, name = max(1, figures.rows), figures.name

    def found(level: Level, what: str, count: int, shown: Sequence[str], advice: str) -> Finding:
        return Finding(level, name, what, count, tuple(shown), advice)

    for kind, counted in figures.odd.items():
        yield found("problem", kind, counted.count, counted.rows, ODD_ADVICE[kind])
    if figures.broken.count:
        broken = figures.broken
        yield found("problem", "rows that cannot be read", broken.count, broken.rows, "mend them")
    for reason, counted in figures.dropped.items():
        what = f"examples that are dropped: {reason}"
        cure = "raise data.cutoff_len" if "cutoff_len" in reason else "mend or remove them"
        yield found("problem", what, counted.count, counted.rows, cure)
    equal, similar = figures.equal, figures.similar
    if equal.count:
        level: Level = "problem" if equal.count > FEW_EQUAL * rows else "note"
        yield found(level, "rows equal to an earlier one", equal.count, equal.rows, _TWICE)
    if similar.count:
        level = "problem" if similar.count > FEW_SIMILAR * rows else "note"
        yield found(level, "rows that resemble an earlier one", similar.count, similar.rows, _TWICE)
    yield from _of_lengths(figures)
    yield from _of_responses(figures)
    for remark in figures.remarks:
        yield found("note", remark, figures.rows, (), "")
    for note, counted in figures.notes.items():
        yield found("note", note, counted.count, counted.rows, "")
    if figures.unread:
        advice = "name them in the entry if they are part of an example"
        what = "columns that nothing reads"
        yield found("note", what, len(figures.unread), figures.unread, advice)


_TWICE = "rows that occur several times are trained on more often than the others"


def _of_lengths(figures: DatasetFigures) -> Iterator[Finding]:
    name, cut = figures.name, figures.cut
    if cut.count:
        level: Level = "problem" if cut.count > FEW_CUT * figures.rows else "note"
        advice = "raise data.cutoff_len, or set data.on_too_long: drop"
        what = "examples that are truncated to data.cutoff_len"
        yield Finding(level, name, what, cut.count, tuple(cut.rows), advice)
    if figures.items and figures.share_trained < FEW_TRAINED:
        what = f"trained tokens, {100 * figures.share_trained:.2g} % of all"
        advice = "most of the work is on prompts; are the responses in the right column?"
        yield Finding("problem", name, what, figures.trained_tokens, (), advice)
    if not figures.items:
        yield Finding("problem", name, "rows, none of which is trained on", figures.rows)


def _of_responses(figures: DatasetFigures) -> Iterator[Finding]:
    name = figures.name
    for one in figures.repeated:
        if one.count > MOST_REPEATED * figures.rows:
            level: Level = "problem" if len(one.text) >= LONG else "note"
            what = f"rows with one response, {one.text!r}"
            yield Finding(level, name, what, one.count, (one.row,), "a model learns it by heart")
    labels = figures.labels
    if labels and min(labels[True], labels[False]) < UNBALANCED * labels.total():
        what = f"rows marked good, and {labels[False]:,} marked bad"
        advice = "weigh them with stage.kto.desirable_weight and undesirable_weight"
        yield Finding("note", name, what, labels[True], (), advice)


def _of_overlap(overlap: Overlap) -> Iterator[Finding]:
    advice = "remove them from one of the two: they are not new to the model"
    for what, counted in (
        ("rows that are also in the training data", overlap.same),
        ("prompts that are also in the training data, with another response", overlap.prompt),
        ("rows that resemble one of the training data", overlap.similar),
    ):
        if counted.count:
            rows = tuple(counted.rows)
            yield Finding("problem", overlap.evaluation, what, counted.count, rows, advice)
