"""The loop: exact resume, one normalisation, events in order, what happens when things go wrong."""

import json
import math
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

import small
import tiny
from project import in_child
from surefoot.data.order.loader import Prefetch
from surefoot.errors import RunError
from surefoot.methods import Freeze, Full, LoRA
from surefoot.optim._variants.adamw import AdamW
from surefoot.optim.optimizer import ON_PLATEAU
from surefoot.optim.plateau import Plateau
from surefoot.stages import SFT
from surefoot.training.callback import TrainerCallback
from surefoot.training.evaluation import EvaluationSet
from surefoot.training.precompute import NOTHING

METHODS = {"full": Full(), "freeze": Freeze(num_layers=1), "lora": LoRA(rank=2, dropout=0.2)}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("method", "packing"),
    [
        pytest.param("full", True, marks=pytest.mark.proof),
        ("lora", False),
        pytest.param("full", False, marks=pytest.mark.proof),
        pytest.param("lora", True, marks=pytest.mark.proof),
        pytest.param("freeze", True, marks=pytest.mark.proof),
        pytest.param("freeze", False, marks=pytest.mark.proof),
    ],
)
def test_a_resumed_run_is_bitwise_the_uninterrupted_run(method, packing, tmp_path):
    """Steps 7 and 8 of 4 windows an epoch: dropout, accumulation, shuffling, in mid-epoch."""
    options = {"method": METHODS[method], "packing": packing, "log_steps": 2}
    whole_log, first_log, second_log = small.Seen(), small.Seen(), small.Seen()
    whole = small.trainer(tmp_path / "whole", whole_log, **options)
    whole.fit()
    first = small.trainer(tmp_path / "cut", first_log, small.StopAt(7), **options)
    first.fit()
    assert {p.name for p in (tmp_path / "cut").iterdir()} == {"checkpoint-3", "checkpoint-6"}

    second = small.trainer(tmp_path / "cut", second_log, **options)
    small.resume(second, tmp_path / "cut" / "checkpoint-6")
    torch.rand(7)  # what ran before must not matter
    second.fit()
    small.assert_same_weights(small.weights(second), small.weights(whole))
    assert first_log.losses | second_log.losses == whole_log.losses
    assert second.state.train_loss_total == whole.state.train_loss_total
    assert [r["step"] for r in second.state.log_history] == [2, 4, 6, 8]
    assert (second.windows.loader.epoch, second.windows.loader.window) == (
        whole.windows.loader.epoch,
        whole.windows.loader.window,
    )


def test_windows_made_ahead_change_no_bit_of_a_run_or_its_resume(tmp_path):
    whole, cut = small.trainer(tmp_path / "whole"), {"prefetch": Prefetch(list)}
    whole.fit()
    small.trainer(tmp_path / "cut", small.StopAt(4), **cut).fit()
    second = small.trainer(tmp_path / "cut", **cut)
    small.resume(second, tmp_path / "cut" / "checkpoint-3").fit()
    small.assert_same_weights(small.weights(second), small.weights(whole))
    assert second.windows.loader.state_dict() == whole.windows.loader.state_dict()


def test_a_log_interval_that_spans_a_resume_reports_the_same_mean(tmp_path):
    whole, cut = small.Seen(), small.Seen()
    small.trainer(tmp_path / "whole", whole, log_steps=4).fit()
    small.trainer(tmp_path / "cut", small.StopAt(3), log_steps=4).fit()
    second = small.trainer(tmp_path / "cut", cut, log_steps=4)
    small.resume(second, tmp_path / "cut" / "checkpoint-3").fit()
    assert cut.losses == whole.losses


@pytest.mark.parametrize("packing", [True, pytest.param(False, marks=pytest.mark.proof)])
def test_accumulation_changes_a_step_only_by_rounding(packing, tmp_path):
    """Micro-batches of unequal token counts, summed and divided once, equal one big batch."""
    logs = []
    for size in (1, 2, 4):
        seen = small.Seen()
        model = tiny.model(dtype=torch.float64)
        built = small.trainer(
            tmp_path / str(size), seen, model=model, micro_batch_size=size, packing=packing,
            max_steps=4, save_steps=None,
        )  # fmt: skip
        built.fit()
        logs.append((seen.losses, small.weights(built)))
    for losses, weights in logs[1:]:
        assert losses == pytest.approx(logs[0][0], rel=1e-9)
        for name, value in weights.items():
            torch.testing.assert_close(value, logs[0][1][name], rtol=1e-7, atol=1e-9)


def test_one_step_is_that_of_a_plain_torch_loop(tmp_path):
    """Mean cross entropy over all trained tokens, clipped, AdamW: written out with torch alone."""
    model = tiny.model(dtype=torch.float64)
    optim = AdamW(learning_rate=5e-3, weight_decay=0.1, epsilon=1e-4)
    options = {"max_steps": 1, "max_grad_norm": 0.1, "save_steps": None, "optim": optim}
    built = small.trainer(tmp_path, model=model, **options)
    order = built.windows.loader.order.indices(0, 0, 4)
    reference = tiny.model(dtype=torch.float64)
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in reference.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in reference.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=5e-3,
        eps=1e-4,
    )
    total, count = 0.0, 0
    for i in order:
        ids = torch.tensor(small.examples()[i]["input_ids"])[None]
        labels = torch.tensor(small.examples()[i]["labels"])[None]
        logits = reference(input_ids=ids).logits[:, :-1]
        total = total + torch.nn.functional.cross_entropy(
            logits.transpose(1, 2), labels[:, 1:], reduction="sum"
        )
        count += int((labels != -100).sum())
    mean = total / count
    mean.backward()
    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    optimizer.step()
    built.fit()
    record = built.state.log_history[0]
    assert record["loss"] == pytest.approx(mean.item(), rel=1e-9)
    assert record["grad_norm"] == pytest.approx(float(norm), rel=1e-6)  # RMSNorm works in float32
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(
            built.policy.module.state_dict()[name], value, rtol=1e-5, atol=1e-6
        )


def test_events_come_in_the_order_trainer_users_know(tmp_path):
    seen = small.Seen()
    built = small.trainer(
        tmp_path,
        seen,
        max_steps=4,
        log_steps=2,
        eval_steps=4,
        save_steps=4,
        evals=small.examples(2),
    )
    built.fit()
    step = ["on_step_begin", "on_substep_end", "on_pre_optimizer_step", "on_optimizer_step"]
    last = [
        name for name in step if name != "on_substep_end"
    ]  # two examples are left: one micro-batch
    assert seen.events == [
        "on_train_begin",
        "on_epoch_begin",
        *[*step, "on_step_end"],
        *[*step, "on_step_end", "on_log"],
        *[*step, "on_step_end"],
        *[*last, "on_step_end", "on_epoch_end"],
        *["on_log", "on_prediction_step", "on_log", "on_evaluate", "on_save"],
        "on_train_end",
    ]


def test_every_example_is_learnt_once_an_epoch_and_the_epoch_is_counted(tmp_path):
    built = small.trainer(tmp_path, max_steps=8)
    state = built.fit()
    assert state.epoch == 2.0
    assert state.num_input_tokens_seen == 2 * sum(len(e["input_ids"]) for e in small.examples())


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.proof)])
def test_half_precision_learns(precision, tmp_path):
    seen = small.Seen()
    options = {"max_steps": 25, "precision": precision, "optim": AdamW(learning_rate=1e-2)}
    small.trainer(tmp_path, seen, **options).fit()
    losses = list(seen.losses.values())
    assert losses[-1] < 0.8 * losses[0]
    assert all(map(math.isfinite, losses))


@pytest.mark.gpu
def test_fp16_gradients_that_overflow_lower_the_scale_and_move_nothing(tmp_path):
    built = small.trainer(tmp_path, max_steps=1, precision="fp16")
    built.policy.step.scaler.scale = 2.0**40
    before = small.weights(built)
    built.fit()
    assert built.policy.step.scaler.scale == 2.0**39
    small.assert_same_weights(small.weights(built), before)


class Poison(TrainerCallback):
    """Makes some windows of the data give nan, whenever they come."""

    def __init__(self, built, places):
        self.built, self.places, self.inner = built, places, built.policy.step.run_window

    def on_step_begin(self, args, state, control):
        epoch, window = divmod(
            self.built.windows.loader.epoch * 4 + self.built.windows.loader.window - 1, 4
        )

        def run(batches, loss, **hooks):
            losses = self.inner(batches, loss, **hooks)
            if (epoch, window) in self.places:
                losses[0].total.fill_(float("nan"))
            return losses

        self.built.policy.step.run_window = run


def poisoned(folder, place, *members, **options):
    built = small.trainer(folder, *members, **options)
    places = place if isinstance(place, list) else [place]
    built.callbacks.add(Poison(built, places))
    return built


@pytest.mark.parametrize("log_steps", [1, 8])
def test_a_loss_that_is_not_a_number_stops_a_run_a_step_late_at_most(log_steps, tmp_path):
    """And nothing of that step is saved."""
    seen = small.Seen()
    built = poisoned(tmp_path, (1, 0), seen, log_steps=log_steps)
    with pytest.raises(RunError, match=r"step 5: loss nan.*checkpoint-3"):
        built.fit()
    assert seen.events.count("on_step_end") == 5
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-3"]


@pytest.mark.parametrize("log_steps", [pytest.param(1, marks=pytest.mark.proof), 8])
def test_skip_leaves_the_step_out_and_goes_on(log_steps, tmp_path):
    built = poisoned(tmp_path, (1, 0), on_nan="skip", log_steps=log_steps)
    state = built.fit()
    assert (state.global_step, state.num_skipped_steps) == (8, 1)
    assert all(map(math.isfinite, small.weights(built)["model.norm.weight"].tolist()))
    assert math.isfinite(state.train_loss_total)


def test_every_skipped_step_is_said_with_the_count_and_the_limit(tmp_path, caplog):
    poisoned(tmp_path, [(0, 1), (1, 0)], on_nan="skip").fit()
    said = [r.message for r in caplog.records if "skipped" in r.message]
    assert [line.partition(":")[0] for line in said] == ["step 2", "step 5"]
    assert "(2 steps so far; the run stops at more than 10, train.max_skipped_steps)" in said[1]


def test_more_skipped_steps_than_allowed_stop_the_run_also_over_resumes(tmp_path):
    places = [(0, 1), (1, 0), (1, 2)]
    with pytest.raises(RunError, match=r"step 5: .* 2 steps skipped is more than .*\(1\)"):
        poisoned(tmp_path, places, on_nan="skip", max_skipped_steps=1).fit()
    more = poisoned(tmp_path, places, on_nan="skip", max_skipped_steps=3)
    resumed = small.resume(more, tmp_path / "checkpoint-3")
    assert resumed.state.num_skipped_steps == 1
    assert resumed.fit().num_skipped_steps == 3


@pytest.mark.parametrize(
    ("on_nan", "cure"),
    [("stop", "set train.on_nan to skip or rollback"), ("rollback", "set train.on_nan to skip")],
)
def test_the_cure_of_a_bad_step_is_another_one_than_what_was_tried(on_nan, cure, tmp_path):
    built = small.trainer(tmp_path, on_nan=on_nan, max_grad_norm=0.0)
    next(built.policy.module.parameters()).data.fill_(float("nan"))
    with pytest.raises(RunError) as stopped:
        built.fit()
    assert "NaN or infinite" in str(stopped.value)
    assert str(stopped.value).endswith(cure)


@pytest.mark.parametrize("log_steps", [pytest.param(1, marks=pytest.mark.proof), 8])
def test_rollback_goes_back_and_leaves_out_the_window(log_steps, tmp_path):
    """Also if nobody looks at the step before the next one has run."""
    built = poisoned(tmp_path, (1, 0), on_nan="rollback", log_steps=log_steps)
    state = built.fit()
    assert state.skipped_windows == [(1, 0)]
    assert state.global_step == 8

    without = small.trainer(tmp_path / "without", on_nan="rollback")
    without.state.skipped_windows.append((1, 0))
    without.fit()
    small.assert_same_weights(small.weights(built), small.weights(without))


def test_rollback_remembers_every_window_that_it_left_out(tmp_path):
    places = [(0, 3), (1, 0), (1, 3), (2, 1)]  # three after checkpoint 3, one after 6
    state = poisoned(tmp_path, places, on_nan="rollback").fit()
    assert (state.skipped_windows, state.global_step) == (places, 8)


def still(folder, steps, **options):
    """A run whose first steps have no gradient."""
    built = small.trainer(folder, max_steps=13, save_steps=50, **options)
    inner = built.policy.step.run_window

    def run(batches, loss, **hooks):
        losses = inner(batches, loss, **hooks)
        for weight in built.policy.module.parameters() if built.state.global_step < steps else ():
            weight.grad.zero_()
        return losses

    built.policy.step.run_window = run
    return built


class Sampling(SFT):
    max_new_tokens = 5


@pytest.mark.parametrize("log_steps", [1, 8])
def test_a_run_whose_first_gradient_is_exactly_0_stops_and_says_so(log_steps, tmp_path):
    with pytest.raises(RunError, match="gradients of the first step are exactly 0"):
        still(tmp_path, 13, log_steps=log_steps).fit()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("checkpoint")]


@pytest.mark.parametrize(
    ("steps", "times"), [(9, 0), (11, 1), pytest.param(13, 1, marks=pytest.mark.proof)]
)
def test_where_responses_are_sampled_ten_steps_without_gradient_are_warned_of(
    steps, times, tmp_path, caplog
):
    """Responses of equal rewards have none."""
    replace(still(tmp_path, steps), stage=Sampling()).fit()
    assert caplog.text.count("first 10 steps of this launch are exactly 0") == times


class Signal(TrainerCallback):
    def __init__(self, event, step):
        setattr(self, event, self.send)
        self.step, self.sent = step, False

    def send(self, args, state, control, **_):
        if state.global_step == self.step and not self.sent:
            self.sent = True
            os.kill(os.getpid(), signal.SIGTERM)


def test_sigterm_finishes_the_step_saves_and_stops(tmp_path):
    built = small.trainer(tmp_path / "cut", Signal("on_pre_optimizer_step", 3), save_steps=None)
    built.fit()
    assert built.stop.received == signal.SIGTERM
    assert [p.name for p in (tmp_path / "cut").iterdir()] == ["checkpoint-4"]
    second = small.resume(small.trainer(tmp_path / "cut"), tmp_path / "cut" / "checkpoint-4")
    second.fit()
    whole = small.trainer(tmp_path / "whole")
    whole.fit()
    small.assert_same_weights(small.weights(second), small.weights(whole))


class SignalLate(TrainerCallback):
    """Sends SIGTERM once it is decided that the step is not to be saved."""

    sent, step = False, 0

    def on_step_end(self, args, state, control):
        self.step = state.global_step
        if self.step == 3:
            while not (Path(args.output_dir) / "checkpoint-2").exists():
                time.sleep(0.01)
            time.sleep(0.1)  # until the writer has told of it

    def on_save(self, args, state, control):
        if self.step % 2 and not self.sent:
            self.sent = True
            os.kill(os.getpid(), signal.SIGTERM)


def test_the_last_step_is_saved_whenever_sigterm_comes(tmp_path):
    built = small.trainer(tmp_path, late := SignalLate(), save_steps=2)
    built.fit()
    assert late.sent
    assert built.saver.newest == tmp_path / f"checkpoint-{built.state.global_step}"


def test_a_second_signal_leaves_at_once(tmp_path):
    class Stuck(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control):
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)

    code = in_child(lambda: small.trainer(tmp_path, Stuck()).fit())
    assert code == -signal.SIGTERM
    assert not list(tmp_path.iterdir())


def test_an_evaluation_that_sigterm_broke_off_is_made_after_the_resume(tmp_path):
    options = {"evals": small.examples(2), "eval_steps": 4, "save_steps": None}
    built = small.trainer(tmp_path, Signal("on_prediction_step", 4), **options)
    built.fit()
    assert not any("eval_loss" in r for r in built.state.log_history)
    seen = small.Seen()
    second = small.trainer(tmp_path, seen, **options)
    small.resume(second, tmp_path / "checkpoint-4").fit()
    assert [log["step"] for log in seen.logs if "eval_loss" in log] == [4, 8]


def test_evaluating_changes_nothing_of_the_training(tmp_path):
    plain = small.trainer(tmp_path / "a")
    plain.fit()
    watched = small.trainer(tmp_path / "b", evals=small.examples(3), eval_steps=1)
    watched.fit()
    small.assert_same_weights(small.weights(plain), small.weights(watched))


def test_the_best_checkpoint_is_saved_at_its_step_and_survives_retention(tmp_path):
    options = {"evals": small.examples(2, seed=9), "eval_steps": 1, "save_steps": 4, "keep": 1}
    optim = AdamW(learning_rate=3e-2, schedule="constant")
    built = small.trainer(tmp_path, load_best_model_at_end=True, optim=optim, **options)
    state = built.fit()
    evaluated = {r["step"]: r["eval_loss"] for r in state.log_history if "eval_loss" in r}
    best = min(evaluated, key=evaluated.get)
    assert (state.best_global_step, state.best_metric) == (best, evaluated[best])
    assert {p.name for p in tmp_path.iterdir()} == {f"checkpoint-{best}", "checkpoint-8"}


def on_plateau(folder, *members, make=small.trainer, **options):
    """Its loss never falls by as much, so each evaluation after the first halves the rate."""
    rule = Plateau(factor=0.5, patience=0, threshold=0.9)
    optim = AdamW(learning_rate=5e-3, weight_decay=0.1, schedule=ON_PLATEAU, plateau=rule)
    held_out = {"evals": small.examples(2, seed=9), "eval_steps": 2}
    return make(folder, *members, optim=optim, **held_out, **options)


def rates(built):
    history = built.state.log_history
    return [r["learning_rate"] for r in history if "learning_rate" in r]


def test_a_rate_that_follows_evaluations_is_logged_and_resumed_to_the_bit(tmp_path):
    whole = on_plateau(tmp_path / "whole")
    whole.fit()
    # Evaluations after steps 2, 4, 6 and 8; the first is the best.
    assert rates(whole) == [5e-3, 5e-3, 5e-3, 5e-3, 2.5e-3, 2.5e-3, 1.25e-3, 1.25e-3]
    on_plateau(tmp_path / "cut", small.StopAt(7)).fit()
    resumed = on_plateau(tmp_path / "cut")
    resumed = small.resume(resumed, tmp_path / "cut" / "checkpoint-6")
    resumed.fit()
    assert rates(resumed) == rates(whole)
    small.assert_same_weights(small.weights(resumed), small.weights(whole))


def test_a_rollback_takes_back_what_evaluations_did_to_the_rate(tmp_path):
    """From step 5, which is bad, to checkpoint 3, before the evaluation of step 4."""
    built = on_plateau(tmp_path, make=poisoned, place=(1, 0), on_nan="rollback")
    built.fit()
    assert rates(built) == [5e-3, 5e-3, 5e-3, 5e-3, 2.5e-3, 2.5e-3, 1.25e-3, 1.25e-3]


def test_a_metric_that_is_not_there_is_named_with_those_that_are(tmp_path):
    options = {"evals": small.examples(2), "eval_steps": 1, "metric_for_best_model": "eval_bleu"}
    with pytest.raises(RunError, match=r"eval_bleu.*eval_loss"):
        small.trainer(tmp_path, **options).fit()


def test_transformers_reads_trainer_state_json(tmp_path):
    small.trainer(tmp_path, evals=small.examples(2), eval_steps=2, keep=2).fit()
    path = tmp_path / "checkpoint-8" / "trainer_state.json"
    state = transformers.TrainerState.load_from_json(str(path))
    assert (state.global_step, state.max_steps, state.epoch) == (8, 8, 2.0)
    assert state.best_model_checkpoint == str(tmp_path / f"checkpoint-{state.best_global_step}")
    assert [r["step"] for r in state.log_history if "loss" in r] == list(range(1, 9))
    json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(word))


def test_a_callback_may_end_the_epoch(tmp_path):
    class ShortEpochs(TrainerCallback):
        def on_step_end(self, args, state, control):
            control.should_epoch_stop = state.global_step % 2 == 0

    built = small.trainer(tmp_path, ShortEpochs(), max_steps=6)
    assert built.fit().epoch == 3.0


def test_predict_measures_and_changes_nothing(tmp_path):
    seen = small.Seen()
    built = small.trainer(tmp_path, seen, micro_batch_size=4)
    before = small.weights(built)
    metrics = built.predict(EvaluationSet(small.examples(3), NOTHING))
    assert set(metrics) == {"predict_loss", "predict_perplexity", "predict_token_accuracy"}
    assert metrics["predict_perplexity"] == pytest.approx(math.exp(metrics["predict_loss"]))
    assert seen.events == ["on_prediction_step", "on_predict"]
    small.assert_same_weights(small.weights(built), before)
