"""Times as people read them."""

from datetime import UTC, datetime

from surefoot.cli import table


def test_a_time_is_that_of_this_place_and_other_text_stays():
    then = datetime(2026, 1, 2, 3, 4, tzinfo=UTC)
    assert table.time("2026-01-02T03:04:05Z") == f"{then.astimezone():%Y-%m-%d %H:%M}"
    assert table.time("once") == "once" and table.time(None) == ""
