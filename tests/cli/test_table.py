"""Figures and times as people read them."""

from datetime import UTC, datetime

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


def test_a_time_is_that_of_this_place_and_other_text_stays():
    then = datetime(2026, 1, 2, 3, 4, tzinfo=UTC)
    assert table.time("2026-01-02T03:04:05Z") == f"{then.astimezone():%Y-%m-%d %H:%M}"
    assert table.time("once") == "once" and table.time(None) == ""
