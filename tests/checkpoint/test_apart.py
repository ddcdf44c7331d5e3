"""The folders of ranks that have none in common."""

import time

from surefoot.checkpoint.apart import Apart
from surefoot.checkpoint.saving import apart as saving
from surefoot.storage import files


def test_what_a_later_launch_has_here_is_not_outdated(tmp_path):
    """A launch that wakes up late shares the disk of the one that has taken over."""
    apart = Apart(url="s3://b/r", launch=2, history=(), folder=str(tmp_path), seconds=1.0)
    for name in ("1/rank_00000", "2/rank_00000", "2/machine_00000", "3/rank_00000"):
        (tmp_path / ".apart" / name).mkdir(parents=True)
    found = {str(path.relative_to(tmp_path / ".apart")) for path in apart.outdated()}
    assert found == {"1", "2/machine_00000"}


def test_an_upload_that_hangs_is_not_waited_for(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(saving, "_PATIENCE", 0.2)
    path = tmp_path / ".apart" / "1" / "rank_00000" / saving.ALIVE
    path.parent.mkdir(parents=True)
    with files.open_or_create(path) as held:
        held.lock()
        began = time.monotonic()
        saving.wait_for_uploads(tmp_path)
        assert time.monotonic() - began >= 0.2
    assert "does not move" in caplog.text
