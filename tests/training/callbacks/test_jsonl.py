"""metrics.jsonl: appended, never a step twice, whatever a crash left behind."""

import json

import pytest

from surefoot.training.callback import TrainerControl, TrainerState
from surefoot.training.callbacks.metric_files import Jsonl


def write(path, records):
    """One session of a run that logs ``records``."""
    callback = Jsonl(path)
    callback.on_train_begin(None, TrainerState(), TrainerControl())
    for record in records:
        callback.on_log(None, TrainerState(), TrainerControl(), logs=record)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def step(number, loss=1.0, speed=100.0):
    return {"step": number, "loss": loss, "tokens_per_second": speed}


def test_every_log_is_one_line(tmp_path):
    write(tmp_path / "m", [step(1), {"step": 1, "eval_loss": 2.0}, step(2)])
    assert lines(tmp_path / "m") == [step(1), {"step": 1, "eval_loss": 2.0}, step(2)]


def test_steps_repeated_after_a_crash_are_not_written_again(tmp_path):
    write(tmp_path / "m", [step(1), step(2), step(3)])
    before = (tmp_path / "m").read_bytes()
    write(tmp_path / "m", [step(2, speed=7.0), step(3, speed=8.0), step(4)])
    assert (tmp_path / "m").read_bytes().startswith(before)
    assert [r["step"] for r in lines(tmp_path / "m")] == [1, 2, 3, 4]


def test_another_course_of_events_replaces_the_old_one_from_where_they_part(tmp_path):
    write(tmp_path / "m", [step(1), step(2), {"step": 2, "eval_loss": 1.0}, step(3)])
    write(tmp_path / "m", [step(2), {"step": 2, "eval_loss": 9.0}, step(4)])
    assert lines(tmp_path / "m") == [step(1), step(2), {"step": 2, "eval_loss": 9.0}, step(4)]


@pytest.mark.parametrize(
    "torn", [b'{"step": 3, "lo', b'{"step": 3}garbage\n', b"\x00\x00\x00\n", b"[]\n"]
)
def test_a_torn_last_line_is_cut_off(torn, tmp_path):
    write(tmp_path / "m", [step(1), step(2)])
    with (tmp_path / "m").open("ab") as file:
        file.write(torn)
    write(tmp_path / "m", [step(3)])
    assert lines(tmp_path / "m") == [step(1), step(2), step(3)]


def test_what_is_not_a_number_is_null(tmp_path):
    write(tmp_path / "m", [step(1, loss=float("nan")), step(2, loss=float("inf"))])
    assert [r["loss"] for r in lines(tmp_path / "m")] == [None, None]
    assert "NaN" not in (tmp_path / "m").read_text()


def resumed(path, history, records=()):
    """A session that resumes from a checkpoint with this ``history``."""
    callback = Jsonl(path)
    state = TrainerState(global_step=max(r["step"] for r in history), log_history=history)
    callback.on_train_begin(None, state, TrainerControl())
    for record in records:
        callback.on_log(None, state, TrainerControl(), logs=record)


HISTORY = [step(1), step(2), {"step": 2, "eval_loss": 2.0}, step(3, loss=float("nan"))]
WHOLE = [step(1), step(2), {"step": 2, "eval_loss": 2.0}, step(3, loss=None)]
TEXT = b"".join(json.dumps(record).encode() + b"\n" for record in WHOLE)


@pytest.mark.parametrize(
    "left",
    [None, b"", TEXT[:90], b"\0" * len(TEXT), TEXT[:60] + b"\0" * 60 + TEXT[120:]],
    ids=["no file", "no bytes", "half", "zeros", "zeros within"],
)
def test_lines_that_a_power_failure_took_come_back_from_the_checkpoint(left, tmp_path):
    if left is not None:
        (tmp_path / "m").write_bytes(left)
    resumed(tmp_path / "m", HISTORY, [step(4)])
    assert lines(tmp_path / "m") == [*WHOLE, step(4)]


def test_a_line_with_another_figure_than_the_checkpoint_is_made_right(tmp_path):
    (tmp_path / "m").write_bytes(TEXT.replace(b'"eval_loss": 2.0', b'"eval_loss": 6.0'))
    resumed(tmp_path / "m", HISTORY)
    assert lines(tmp_path / "m") == WHOLE


def test_a_complete_file_is_not_touched_and_later_lines_stay(tmp_path):
    write(tmp_path / "m", [step(1, speed=7.0), *HISTORY[1:], step(4), step(5)])
    before = (tmp_path / "m").stat()
    resumed(tmp_path / "m", HISTORY)
    assert (tmp_path / "m").stat().st_mtime_ns == before.st_mtime_ns
    assert (tmp_path / "m").stat().st_ino == before.st_ino
    assert [r["step"] for r in lines(tmp_path / "m")] == [1, 2, 2, 3, 4, 5]
