"""The process that encodes while another trains: what it leaves behind."""

import tempfile

import pytest

from surefoot.errors import DataError
from surefoot.run import _encoder_worker
from surefoot.run._encoder_worker import EncoderWorker


def test_a_worker_that_is_started_again_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    real = _encoder_worker.Child
    monkeypatch.setattr(
        _encoder_worker, "Child", lambda _, log: real(["-c", "raise SystemExit(3)"], log=log)
    )
    with EncoderWorker(lambda: "model: {path: none}") as worker:
        with pytest.raises(DataError, match=r"the encoder process ended .*3"):
            for _ in range(1000):
                worker.wait()
        assert len(list(tmp_path.iterdir())) == 1
    assert list(tmp_path.iterdir()) == []
