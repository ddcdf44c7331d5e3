"""A process that hangs while it writes is noticed by the folder that does not change."""

import os
import shutil

from surefoot.storage.folder_lock import StallWatch


def test_a_folder_that_vanishes_while_it_is_looked_at_is_a_change(tmp_path, monkeypatch):
    inner = tmp_path / "save" / "rank_00000"
    inner.mkdir(parents=True)
    (inner / "file").touch()
    watch = StallWatch(lambda: [tmp_path / "save"])
    watch.seconds()
    before = watch.seconds()
    assert before > 0
    scandir = os.scandir

    def remove_first(path):
        if path in (inner, str(inner)):
            shutil.rmtree(inner.parent)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", remove_first)
    assert watch.seconds() == 0
