"""Early stopping, the plot, TensorBoard and the screen, on a real run of the loop."""

import errno
import io
import json
import time
from dataclasses import replace

import pytest
from rich.console import Console

import small
from surefoot.training.callback import TrainerCallback, TrainerControl, TrainerState
from surefoot.training.callbacks._progress import LABELS, Screen, duration, fitting
from surefoot.training.callbacks.metric_files import Jsonl, Plot, TensorBoard, curves, smoothed
from surefoot.training.control import EarlyStop
from surefoot.training.kept_rollouts import KeptRollouts


class ScriptedEvaluation:
    """Gives scripted losses, one for each step."""

    def __init__(self, state, losses):
        self.state, self.losses = state, dict(enumerate(losses, start=1))
        self.kept = KeptRollouts()

    def measure(self, _held_out, _after):
        return {"loss": self.losses[self.state.global_step]}


LOSSES = [5.0, 4.0, 4.5, 3.95, 4.2, 4.1, 4.0, 4.0]


def stopping(folder, **options):
    stop = EarlyStop(patience=3, threshold=0.1)
    built = small.trainer(
        folder, stop, evals=small.examples(1), eval_steps=1, save_steps=2, **options
    )
    return replace(built, evaluation=ScriptedEvaluation(built.state, LOSSES))


def test_early_stop_goes_on_counting_after_a_resume(tmp_path):
    first = stopping(tmp_path)
    first.callbacks.add(small.StopAt(4))
    first.fit()
    second = small.resume(stopping(tmp_path), tmp_path / "checkpoint-4")
    assert second.fit().global_step == 5


def test_a_run_that_has_stopped_early_does_not_resume_unless_it_is_given_more_patience(tmp_path):
    # it counts evaluations that are not better by the threshold: 4.5, 3.95 (only 0.05) and 4.2
    assert stopping(tmp_path).fit().global_step == 5
    again = small.resume(stopping(tmp_path), tmp_path / "checkpoint-5")
    assert again.fit().global_step == 5
    more = small.resume(stopping(tmp_path), tmp_path / "checkpoint-5")
    more.callbacks.members[-1].patience = 5
    assert more.fit().global_step == 7


def test_the_plot_is_a_png_of_both_curves(tmp_path):
    options = {"evals": small.examples(1), "eval_steps": 2, "max_steps": 24}
    small.trainer(tmp_path, Plot(tmp_path / "loss.png"), **options).fit()
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("age", [0.0, 3600.0])
def test_a_save_redraws_the_plot_once_the_last_picture_is_old(age, tmp_path):
    plot, found = Plot(tmp_path / "loss.png", age), TrainerState()
    plot.on_save(None, found, TrainerControl())
    assert (tmp_path / "loss.png").is_file() == (age == 0.0)
    plot.on_train_end(None, found, TrainerControl())
    assert (tmp_path / "loss.png").is_file()


def test_every_figure_of_the_plot_is_in_the_metrics(tmp_path):
    options = {"evals": small.examples(1), "eval_steps": 2, "max_steps": 5}
    state = small.trainer(tmp_path, Jsonl(tmp_path / "metrics.jsonl"), **options).fit()
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for label, name in (("training", "loss"), ("evaluation", "eval_loss")):
        logged = [(r["step"], r[name]) for r in records if name in r]
        assert list(zip(*curves(state)[label], strict=True)) == logged


def test_the_smoothed_curve_does_not_lag():
    falling = [5.0 - step / 100 for step in range(200)]
    assert smoothed(falling) == pytest.approx(falling)
    noisy = [value + 0.5 * (-1) ** step for step, value in enumerate(falling)]
    assert smoothed(noisy)[5:-5] == pytest.approx(falling[5:-5], abs=0.06)
    assert smoothed([1.0, float("nan"), 3.0, 4.0])[-1] == 4.0


def resumed_on_a_board(folder, *first):
    """A run that was stopped after step 5 and resumed from step 3, and the losses on its board."""
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    small.trainer(folder, *first, small.StopAt(5)).fit()
    second = small.trainer(folder, TensorBoard(folder / "board"))
    small.resume(second, folder / "checkpoint-3").fit()
    reader = reading.EventAccumulator(str(folder / "board"))
    reader.Reload()
    return second, [(event.step, event.value) for event in reader.Scalars("train/loss")]


@pytest.mark.parametrize(
    "ahead",
    [pytest.param(0, marks=pytest.mark.proof), 3600],
    ids=["in order", "the clock went back"],
)
def test_tensorboard_holds_every_step_once_after_a_crash_and_a_resume(ahead, tmp_path, monkeypatch):
    real = time.time

    class Ahead(TrainerCallback):
        def on_train_begin(self, args, state, control):
            monkeypatch.setattr(time, "time", lambda: real() + ahead)

        def on_train_end(self, args, state, control):
            monkeypatch.setattr(time, "time", real)

    _, found = resumed_on_a_board(tmp_path, Ahead(), TensorBoard(tmp_path / "board"))
    assert [step for step, _ in found] == list(range(1, 9))


def test_tensorboard_without_its_earlier_files_is_filled_from_the_log(tmp_path):
    second, found = resumed_on_a_board(tmp_path)
    logged = {log["step"]: log["loss"] for log in second.state.log_history if "loss" in log}
    assert dict(found) == pytest.approx(logged)
    assert [step for step, _ in found] == list(range(1, 9))


@pytest.mark.parametrize("when", [pytest.param("before", marks=pytest.mark.proof), "during"])
def test_a_disk_that_tensorboard_cannot_write_on_does_not_stop_a_run(tmp_path, when, caplog):
    pytest.importorskip("tensorboard")
    board, writer = tmp_path / "board", TensorBoard(tmp_path / "board")

    class Break(TrainerCallback):
        def on_step_end(self, args, state, control):
            if when == "during" and state.global_step == 3:
                writer._writer.flush = full

    if when == "before":
        board.write_text("a file in the place of the folder")
    state = small.trainer(tmp_path, Break(), writer).fit()
    assert state.global_step == 8
    said = [r.message for r in caplog.records if "tensorboard" in r.message]
    assert len(said) == 1 and said[0].endswith("metrics.jsonl has all figures")


def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def screen_of(folder, *, terminal):
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=160, color_system=None)
    small.trainer(folder, Screen(console), evals=small.examples(1), eval_steps=4).fit()
    return text.getvalue()


def test_a_terminal_shows_a_live_line_with_figures_and_the_last_checkpoint(tmp_path):
    lines = screen_of(tmp_path, terminal=True).splitlines()
    last = [line for line in lines if "step" in line][-1]
    for word in ("8/8", "loss", "lr", "grad", "tok/s", "mem", "checkpoint-8", "left 0:00"):
        assert word in last


def test_the_live_line_leaves_out_what_a_narrow_terminal_has_no_room_for():
    figures = dict.fromkeys(LABELS, "1234")
    assert fitting(figures, 200) == set(LABELS)
    assert fitting(figures, 22) == {"loss", "left"}
    assert fitting(figures, 5) == set()
    assert fitting({}, 200) == set()


def test_without_a_terminal_the_log_has_plain_lines(tmp_path, caplog):
    with caplog.at_level("INFO", logger="surefoot"):
        assert screen_of(tmp_path, terminal=False) == ""
    lines = [r.getMessage() for r in caplog.records]
    assert any(line.startswith("step=8/8 loss=") and "eta=0:00" in line for line in lines)
    assert any("eval_loss=" in line for line in lines)
    assert f"saved {tmp_path / 'checkpoint-8'}" in lines


def test_durations_read_well():
    assert [duration(s) for s in (5, 65, 3_725, float("inf"))] == ["0:05", "1:05", "1:02:05", "?"]
