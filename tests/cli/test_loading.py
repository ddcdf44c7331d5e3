"""The collector of garbage while something heavy is imported, and after."""

import gc

import pytest

from surefoot.cli.loading import loading


@pytest.fixture(autouse=True)
def _thawed():
    yield
    gc.unfreeze()


def test_nothing_is_collected_inside_and_what_came_is_set_aside():
    with loading():
        assert not gc.isenabled()
        came = [[] for _ in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() > len(came)


def test_a_failed_import_leaves_the_collector_on():
    with pytest.raises(ModuleNotFoundError), loading():
        import surefoot.nowhere  # noqa: F401
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off():
    gc.disable()
    try:
        with loading():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
