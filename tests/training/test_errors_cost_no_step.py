"""An error outside an update ends a run with its last whole step saved, and what is resumed from
there is bitwise the run that met no error: raised at every call that the loop makes."""

import json
from contextlib import contextmanager

import pytest
import torch

import ranks
import small
import spread
import surefoot
from project import Project, assert_same, final_weights, losses
from stage_data import REWARD
from surefoot.checkpoint.disk.commit import committed, step_of
from surefoot.errors import CheckpointError, LostPeerError, RunError
from surefoot.methods import BAdam, Full, LoRA
from surefoot.optim import OPTIMIZERS
from surefoot.training.callback import EVENTS, TrainerCallback

STEPS = 8


class PlantedError(Exception):
    """The error that is raised."""


class Counting(TrainerCallback):
    """A callback with a state, of which no event may be missed or counted twice."""

    def __init__(self):
        self.counts = {}

    def state_dict(self):
        return dict(self.counts)

    def load_state_dict(self, state):
        self.counts = dict(state)


def _counting(event):
    def method(self, args, state, control, **details):
        self.counts[event] = self.counts.get(event, 0) + 1

    return method


# The others come again where what they are of does: with a launch, or a step that was begun.
COUNTED = ("epoch_begin", "epoch_end", "optimizer_step", "step_end", "log", "evaluate")
for _event in COUNTED:
    setattr(Counting, f"on_{_event}", _counting(_event))


class Plant:
    """Raises at the ``number``-th call in a trainer, and remembers the step that was whole then."""

    def __init__(self, number, error=PlantedError):
        self.left, self.error, self.whole = number, error, None

    def __call__(self, made):
        self.left -= 1
        if self.left == 0:
            self.whole = made.state.global_step
            raise self.error("planted")


def before(owner, name):
    """The planted error instead of a call of a method."""

    def plant(made, planted):
        target = owner(made)
        true = getattr(target, name)

        def method(*given, **named):
            planted(made)
            return true(*given, **named)

        object.__setattr__(target, name, method)

    return plant


def at_event(event):
    def plant(made, planted):
        def method(self, args, state, control, **details):
            planted(made)

        made.callbacks.add(type("Raising", (TrainerCallback,), {f"on_{event}": method})())

    return plant


def in_a_pass(*, with_gradients):
    """Where a picture is read, for one."""

    def plant(made, planted):
        def check(module, args, kwargs):
            if torch.is_grad_enabled() == with_gradients:
                planted(made)

        made.policy.network.inner.register_forward_pre_hook(check, with_kwargs=True)

    return plant


PLACES = {
    **{
        name: at_event(name)
        for name in (event.removeprefix("on_") for event in EVENTS)
        if name not in ("init_end", "train_begin", "train_end", "predict")  # outside the loop
    },
    "fetch": before(lambda made: made.windows.loader, "next_examples"),
    "columns": before(lambda made: made.windows.kept, "added"),
    "deal": before(lambda made: made.windows.loader, "deal"),
    "held-out columns": before(lambda made: made.evals[""].kept, "added"),
    "held-out batch": before(lambda made: made.evaluation, "_batches"),
    "rollouts": before(lambda made: made.evaluation.kept, "write"),
    "metrics": before(lambda made: made.stage, "metrics"),
    "pass": in_a_pass(with_gradients=True),
    "evaluation": in_a_pass(with_gradients=False),
    "poll": before(lambda made: made.saver, "poll"),
}
ONE_CALL = {"epoch_end": 1, "epoch_begin": 2, "save": 1, "rollouts": 2}


def planted_in(name):
    error = CheckpointError if name == "poll" else PlantedError
    return Plant(ONE_CALL.get(name, 3), error)


def alone(folder, counting, **options):
    options = {"save_steps": 5, "eval_steps": 2, "log_steps": 2, **options}
    return small.trainer(folder, counting, evals=small.examples(6, seed=7), **options)


@contextmanager
def uninterrupted(folder, **options):
    counting = Counting()
    whole = alone(folder, counting, **options)
    whole.fit()
    yield whole, counting


def assert_costs_nothing(folder, plant, planted, whole, counting, **options):
    made = alone(folder, Counting(), **options)
    plant(made, planted)
    with pytest.raises(planted.error, match="planted"):
        made.fit()
    newest = committed(folder)[-1]
    assert planted.whole <= step_of(newest) <= planted.whole + 1
    assert step_of(newest) == made.state.global_step
    again = Counting()
    second = small.resume(alone(folder, again, **options), newest)
    second.fit()
    small.assert_same_weights(small.weights(second), small.weights(whole))
    assert [clockless(r) for r in second.state.log_history] == [
        clockless(r) for r in whole.state.log_history
    ]
    assert second.windows.state_dict() == whole.windows.state_dict()
    assert again.counts == counting.counts


def failing_log(step):
    class Failing(TrainerCallback):
        def on_log(self, args, state, control, logs):
            if state.global_step == step:
                raise PlantedError

    return Failing()


def clockless(record):
    return {n: v for n, v in record.items() if not n.endswith(("_per_second", "_runtime"))}


def test_an_error_at_any_call_of_the_loop_costs_no_step(tmp_path):
    with uninterrupted(tmp_path / "whole") as (whole, counting):
        for name, plant in PLACES.items():
            planted = planted_in(name)
            assert_costs_nothing(tmp_path / name, plant, planted, whole, counting)
            assert planted.whole, name


@pytest.mark.parametrize(
    "options",
    [
        {"method": BAdam(switch_interval=3)},
        {"method": LoRA(rank=2, dropout=0.2), "packing": False},
        {"method": Full(), "optim": OPTIMIZERS["schedule_free"]()},
    ],
    ids=["badam", "lora", "schedule_free"],
)
def test_a_step_that_has_begun_is_undone(options, tmp_path):
    """Its gradients, another block of parameters, another point of the weights, what was drawn."""
    with uninterrupted(tmp_path / "whole", **options) as (whole, counting):
        for number in (7, 13):  # in step 4, of another block, and the second micro-batch of step 7
            plant = PLACES["pass"], Plant(number)
            folder = tmp_path / str(number)
            assert_costs_nothing(folder, *plant, whole, counting, **options)


def test_the_state_is_that_of_the_last_whole_step(tmp_path):
    """To the bit, also what was drawn: as the run that saves at that step."""
    alone(tmp_path / "saving", Counting(), save_steps=1).fit()
    for name in ("fetch", "deal", "pass"):
        made = alone(tmp_path / name, Counting(), save_steps=None)
        PLACES[name](made, Plant(6))
        with pytest.raises(PlantedError):
            made.fit()
        saved = committed(tmp_path / name)[-1]
        other = tmp_path / "saving" / saved.name
        parts = [path.name for path in saved.iterdir() if path.suffix == ".safetensors"]
        assert "state.safetensors" in parts
        for part in parts:
            assert (saved / part).read_bytes() == (other / part).read_bytes(), (name, part)
        states = [json.loads((folder / "state.json").read_text()) for folder in (saved, other)]
        for state in states:
            state["trainer"].pop("train_runtime")
            state["trainer"]["log_history"] = [
                clockless(record) for record in state["trainer"]["log_history"]
            ]
        assert states[0] == states[1]


def test_an_error_before_the_first_step_of_a_launch_ends_it_at_once(tmp_path):
    made = alone(tmp_path, Counting())
    PLACES["step_begin"](made, Plant(1))
    with pytest.raises(PlantedError):
        made.fit()
    assert not committed(tmp_path)


def test_a_second_error_is_said_and_the_first_is_raised(tmp_path, caplog):
    made = alone(tmp_path, Counting(), save_steps=2)
    PLACES["fetch"](made, Plant(6))
    PLACES["step_end"](made, Plant(4, KeyError))
    before(lambda each: each.saver, "save")(made, Plant(2, CheckpointError))
    with pytest.raises(KeyError, match="planted"):
        made.fit()
    assert [path.name for path in committed(tmp_path)] == ["checkpoint-2"]
    assert "after that, another error: CheckpointError: planted" in caplog.text
    lost = "2 steps since checkpoint-2 are lost by this error; the same command resumes from there"
    assert lost in caplog.text


def test_a_step_that_is_saved_is_not_saved_twice(tmp_path, caplog):
    caplog.set_level("INFO")
    made = alone(tmp_path, Counting(), save_steps=1)
    PLACES["fetch"](made, Plant(6))
    with pytest.raises(PlantedError):
        made.fit()
    assert [step_of(path) for path in committed(tmp_path)] == [1, 2, 3, 4, 5]
    assert "step 5 is saved; the same command resumes from it" in caplog.text


def test_of_two_ranks_one_fails_and_both_save(tmp_path):
    """Wherever no other rank waits for it in a collective of a model."""
    untold = ("save", "pass", "evaluation", "held-out batch", "metrics")
    places = [name for name in PLACES if name not in untold]

    def built(world, folder, counting):
        train = {"max_steps": STEPS, "eval_steps": 2, "log_steps": 2, "micro_batch_size": 1}
        options = {"train": train, "held": small.examples(6, seed=7), "callbacks": [counting]}
        return spread.trainer(world, folder, method=LoRA(rank=2, dropout=0.2), **options)

    def work(world):
        counting = Counting()
        whole = built(world, tmp_path / "whole", counting)
        whole.fit()
        for name in places:
            made, planted = built(world, tmp_path / name, Counting()), planted_in(name)
            if world.rank == (name != "rollouts"):
                PLACES[name](made, planted)
            try:
                made.fit()
            except (LostPeerError, planted.error) as error:
                is_own = planted.whole is not None
                assert isinstance(error, planted.error if is_own else LostPeerError), (name, error)
            else:
                raise AssertionError(name)
            saved, again = committed(tmp_path / name), Counting()
            assert saved, (name, made.state.global_step)
            newest = saved[-1]
            assert step_of(newest) == made.state.global_step > 1, name
            second = spread.resume(built(world, tmp_path / name, again), newest)
            second.fit()
            small.assert_same_weights(small.weights(second), small.weights(whole))
            assert again.counts == counting.counts, name
        return len(places)

    assert ranks.run(2, work, timeout=240, dp_replicate=2, dp_shard=1) == [len(places)] * 2


def test_replicas_agree_on_an_error_inside_a_pass(tmp_path):
    def work(world):
        parallel = {"dp_replicate": 2, "dp_shard": 1}
        made = spread.trainer(world, tmp_path, train={"max_steps": STEPS}, parallel=parallel)
        if world.rank == 1:
            PLACES["pass"](made, Plant(4))
        with pytest.raises(PlantedError if world.rank else LostPeerError):
            made.fit()
        return made.state.global_step

    steps = ranks.run(2, work, dp_replicate=2, dp_shard=1)
    assert steps[0] == steps[1] > 0
    assert step_of(committed(tmp_path)[-1]) == steps[0]


def test_a_rank_that_cannot_be_told_costs_steps_which_are_counted(tmp_path):
    """One of two that share weights: the other waits for it in a layer."""
    text = tmp_path / "said"

    def work(world):
        import logging  # of this process

        made = spread.trainer(world, tmp_path / "run", train={"max_steps": STEPS})
        logging.getLogger("surefoot").addHandler(logging.FileHandler(text))
        if world.rank == 0:
            PLACES["pass"](made, Plant(4))
        made.fit()

    with pytest.raises(AssertionError, match="planted"):
        ranks.run(2, work, dp_shard=2)
    assert "since the start are lost by this error" in text.read_text()


def test_a_reward_that_fails_inside_rollouts_costs_no_step(tmp_path):
    """In the middle of the windows of a run: of the steps of a window some are taken."""
    reward = (tmp_path / "reward.py").absolute()
    reward.write_text(
        f"import sys, pathlib\nsys.path.insert(0, {str(REWARD.parent)!r})\n"
        "from stage_rewards import varied as true\n"
        "def varied(prompts, completions, **columns):\n"
        f"    if (at := pathlib.Path({str(tmp_path / 'calls')!r})).exists():\n"
        "        at.write_text(at.read_text() + '.')\n"
        "        if len(at.read_text()) == 4: raise ValueError('planted')\n"
        "    return true(prompts, completions, **columns)\n"
    )
    stage = {"grpo": {"reward": f"{reward}:varied", "group_size": 3, "passes": 2}}
    stage["grpo"] |= {"mini_batches": 2, "max_new_tokens": 5}
    train, checkpoint = {"max_steps": 14}, {"save_steps": 14}
    whole, cut = (
        Project(tmp_path / name, stage=stage, train=train, checkpoint=checkpoint)
        for name in ("whole", "cut")
    )
    surefoot.train(whole.recipe)
    (tmp_path / "calls").write_text("")
    with pytest.raises(RunError, match="planted"):
        surefoot.train(cut.recipe)
    assert [path.name for path in committed(cut.run)] == ["checkpoint-8"]
    (tmp_path / "calls").unlink()
    with pytest.raises(PlantedError):  # two steps of four into a window
        surefoot.train(cut.recipe, callbacks=[failing_log(10)])
    assert committed(cut.run)[-1].name == "checkpoint-10"
    surefoot.train(cut.recipe)
    assert_same(final_weights(cut.run), final_weights(whole.run))
    assert losses(cut.run) == losses(whole.run)
