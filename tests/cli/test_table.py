"""Figures and times as people read them."""

from datetime import UTC, datetime, timedelta

import pytest

from surefoot.cli import table


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (None, ""),
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (999_600, "1 MB"),
        (1_234_567, "1.23 MB"),
        (5 * 10**9, "5 GB"),
        (10**19, "1e+04 PB"),
    ],
)
def test_sizes(count, text):
    assert table.in_bytes(count) == text


@pytest.mark.parametrize(
    ("ago", "words"),
    [
        (timedelta(seconds=5), " s ago)"),
        (timedelta(minutes=5), "(5 min ago)"),
        (timedelta(hours=5), "(5 h ago)"),
        (timedelta(days=5), "(5 days ago)"),
    ],
)
def test_times(ago, words):
    then = (datetime.now(UTC) - ago).isoformat(timespec="seconds").replace("+00:00", "Z")
    assert table.when(then).endswith(words)
    assert table.when("once") == "once" and table.when(None) == ""
