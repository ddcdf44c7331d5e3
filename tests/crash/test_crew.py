"""Whatever happens to one of several that save together: all of a checkpoint, or none; no wait."""

import pytest

from .test_kills import run

EVENTS = ["before", "within", "after", "again", "ENOSPC", "EIO", "dying", "orphans", "all"]


@pytest.mark.parametrize("layout", ["distributed", pytest.param("full", marks=pytest.mark.proof)])
def test_a_process_of_two_is_killed_or_fails(layout, scratch):
    target = scratch / layout
    target.mkdir()
    assert int(run("crash.crew", ",".join(["moments", *EVENTS]), 2, layout, 37, target)) > 15


@pytest.mark.proof
@pytest.mark.parametrize("layout", ["full", "distributed"])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("event", ["moments", *EVENTS])
def test_any_process_is_killed_or_fails_at_any_change_it_makes(event, ranks, layout, scratch):
    target = scratch / f"{event}-{ranks}-{layout}"
    target.mkdir()
    cases = int(run("crash.crew", event, ranks, layout, 1, target))
    assert cases >= (50 if event != "moments" else 6)
    print(f"{event}, {ranks} ranks, {layout}: {cases} cases")
