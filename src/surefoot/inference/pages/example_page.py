"""The page of a preview: examples with their masks as colors, and statistics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from ..preview import DatasetStats, PreviewExample, RenderedExample
from .html import bars, page_of, text
from .length_histogram import length_bins

LEGEND = '<p class="legend"><mark>trained</mark> &nbsp; <span class="dim">masked</span></p>'


def preview_page(found: Sequence[DatasetStats], recipe: str, cutoff_len: int) -> str:
    """The examples of each dataset, then its statistics."""
    parts = [LEGEND, *(_dataset(stats, cutoff_len) for stats in found)]
    return page_of(f"surefoot preview {recipe}", "\n".join(parts))


def _dataset(stats: DatasetStats, cutoff_len: int) -> str:
    examples = "".join(_example(shown) for shown in stats.shown)
    facts = "".join(f"<li>{text(line)}</li>" for line in _facts(stats))
    bins = length_bins(Counter(stats.lengths), cutoff_len)
    lengths = bars([(f"{b.above + 1:,} to {b.most:,}", b.count, b.most > cutoff_len) for b in bins])
    return (
        f"<h2>{text(stats.name)}</h2><ul>{facts}</ul><h3>Tokens of a sequence before truncation"
        f"</h3><p>data.cutoff_len is {cutoff_len:,}; longer sequences are red.</p>{lengths}"
        f"{examples}"
    )


def _example(shown: PreviewExample) -> str:
    sequences = "".join(f"<pre>{''.join(_parts(item))}</pre>" for item in shown.items)
    return f"<h3>{text(shown.origin)}: {text(shown.outcome)}</h3>{sequences}"


def _parts(item: RenderedExample) -> Iterator[str]:
    answer = None
    for part in item.parts:
        if part.answer != answer and part.answer is not None:
            yield f"<b>{text(part.answer)}</b>"
        answer = part.answer
        kind = ' class="rejected"' if answer == "rejected" else ""
        words = text(part.text)
        yield f"<mark{kind}>{words}</mark>" if part.learnt else f"<span>{words}</span>"


def _facts(stats: DatasetStats) -> Iterator[str]:
    rows, sequences, tokens, trained = stats.totals
    yield f"{rows}, {sequences}"
    yield f"{tokens}, {trained}"
    yield from stats.remarks()
