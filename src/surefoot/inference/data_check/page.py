"""The page of a check."""

from __future__ import annotations

from collections.abc import Iterator

from ...errors import counted
from ..pages.html import bars, page_of, text
from ..pages.length_histogram import length_bins
from .figures import QUANTILES, DataCheck, DatasetFigures, Finding, Overlap

SCRIPTS = 10  # that are shown


def check_page(found: DataCheck, recipe: str) -> str:
    """All figures, findings first."""
    parts = [_findings(found)]
    parts += [_dataset(figures, found.cutoff_len) for figures in found.datasets]
    parts += [_overlap(overlap) for overlap in found.overlaps]
    return page_of(f"surefoot data check {recipe}", "\n".join(parts))


def _findings(found: DataCheck) -> str:
    if not found.findings:
        return "<p>Nothing was found.</p>"
    rows = "".join(_finding(finding) for finding in found.findings)
    head = '<tr><th></th><th>dataset</th><th class="n">count</th><th>what</th><th>rows</th></tr>'
    return f"<table>{head}{rows}</table>"


def _finding(finding: Finding) -> str:
    advice = f'<br><span class="dim">{text(finding.advice)}</span>' if finding.advice else ""
    return (
        f'<tr><td class="{finding.level}">{finding.level}</td><td>{text(finding.dataset)}</td>'
        f'<td class="n">{finding.count:,}</td><td>{text(finding.what)}{advice}</td>'
        f'<td class="dim">{"<br>".join(map(text, finding.rows))}</td></tr>'
    )


def _dataset(figures: DatasetFigures, cutoff_len: int) -> str:
    facts = "".join(f"<tr><th>{text(a)}</th><td>{text(b)}</td></tr>" for a, b in _facts(figures))
    bins = length_bins(figures.lengths, cutoff_len)
    lengths = bars([(f"{b.above + 1:,} to {b.most:,}", b.count, b.most > cutoff_len) for b in bins])
    scripts = bars([(n, c, False) for n, c in figures.scripts.most_common(SCRIPTS)])
    quantiles = ", ".join(
        f"{'longest' if share == QUANTILES[-1] else f'{100 * share:g} % up to'} {length:,}"
        for share, length in figures.quantiles().items()
    )
    return (
        f"<h2>{text(figures.name)}</h2><table>{facts}</table>"
        f"<h3>Tokens of a sequence</h3><p>{quantiles}; data.cutoff_len is {cutoff_len:,}. Longer "
        f"sequences are red.</p>{lengths}"
        "<h3>Scripts</h3><p>Of the letters of responses. The language of Latin letters is a guess "
        f"from frequent words.</p>{scripts}"
    )


def _facts(figures: DatasetFigures) -> Iterator[tuple[str, str]]:
    first = "" if figures.all_rows else "the first "
    yield "rows", f"{first}{figures.rows:,}"
    yield "sequences", f"{figures.items:,}"
    yield "tokens", f"{figures.tokens:,}, {100 * figures.share_trained:.1f} % trained"
    yield "truncated", f"{figures.cut.count:,}"
    yield "equal to an earlier row", f"{figures.equal.count:,}"
    yield "similar to an earlier row", f"{figures.similar.count:,}"
    if figures.labels:
        yield "marked good, bad", f"{figures.labels[True]:,}, {figures.labels[False]:,}"
    for one in figures.repeated:
        yield "the same response", f"{counted(one.count, 'row')}: {one.text!r}"


def _overlap(overlap: Overlap) -> str:
    return (
        f"<h2>Evaluation data: {text(overlap.evaluation)}</h2><p>Of {overlap.rows:,} rows, "
        f"{overlap.same.count:,} are in the training data, {overlap.prompt.count:,} have a prompt "
        f"of it with another response, and {overlap.similar.count:,} resemble a row of it.</p>"
    )
