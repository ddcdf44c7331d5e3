"""Callbacks as they are written for the Trainer of transformers."""

import math

import pytest
import transformers
import yaml

import small
import surefoot
from folders import save_recipe
from surefoot.errors import RecipeError, RunError
from surefoot.training import TrainerCallback, TrainerControl


class Parts:
    """Derives from nothing, and takes what the Trainer passes; a class, not an object."""

    seen = []

    def on_step_end(self, args, state, control, model=None, tokenizer=None, **kwargs):
        rates = kwargs["lr_scheduler"].get_last_lr()
        groups = [group["lr"] for group in kwargs["optimizer"].param_groups]
        assert rates == groups
        ids = tokenizer("a", return_tensors="pt")
        made = model.generate(**ids, max_new_tokens=1, do_sample=False)
        norm = sum(float(p.detach().norm()) for p in model.parameters())
        data = kwargs["train_dataloader"]
        self.seen.append((rates[0], len(made), norm, len(data), data.batch_size))
        assert kwargs["processing_class"] is tokenizer
        assert len(kwargs["eval_dataloader"]) == 3  # six rows, two a batch
        with pytest.raises(RunError, match="would change its order"):
            next(iter(data))


def test_a_class_without_a_base_class_gets_the_parts_that_the_trainer_passes(tmp_path):
    Parts.seen.clear()
    recipe = save_recipe(tmp_path)
    run = surefoot.train(recipe, callbacks=[Parts], **{"train.log_steps": 1})
    rates = [r["learning_rate"] for r in run.log_history if "learning_rate" in r]
    assert [seen[0] for seen in Parts.seen] == pytest.approx(rates)
    assert len({seen[2] for seen in Parts.seen}) == len(rates) > 1  # the weights that are trained


class Returns:
    def __init__(self, value):
        self.value = value

    def on_step_end(self, args, state, control):
        return self.value


@pytest.mark.parametrize("kind", [TrainerControl, transformers.TrainerControl])
def test_a_control_that_an_event_returns_is_obeyed(kind, tmp_path):
    trainer = small.trainer(tmp_path, Returns(kind(should_training_stop=True)))
    assert trainer.fit().global_step == 1


def test_a_value_that_is_no_control_is_named(tmp_path):
    trainer = small.trainer(tmp_path, Returns(True))
    with pytest.raises(RunError, match=r"Returns\.on_step_end returned a bool"):
        trainer.fit()


class Silent:
    """Has no event."""


class Needs(TrainerCallback):
    def __init__(self, limit):
        self.limit = limit


@pytest.mark.parametrize(
    ("callback", "says"),
    [(Silent, "no method of an event"), (Needs, "limit.*give an object"), (7, "int has no method")],
)
def test_what_is_no_callback_is_refused_before_the_run(callback, says, tmp_path):
    recipe = save_recipe(tmp_path)
    with pytest.raises(RecipeError, match=says):
        surefoot.train(recipe, callbacks=[callback])
    assert not (tmp_path / "run").exists()


def test_a_callback_of_the_base_class_of_transformers_can_stop_a_run(tmp_path):
    class Stops(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            if math.isfinite(logs["loss"]):
                control.should_training_stop = True
            return control

    trainer = small.trainer(tmp_path, Stops())
    assert trainer.fit().global_step < trainer.state.max_steps


def test_early_stopping_of_transformers_stops_where_ours_does(tmp_path):
    """Not at once: a new best counts as one, as the state has the best of before."""
    better = {"optim": {"adamw": {"learning_rate": 0.003}}}
    theirs = transformers.EarlyStoppingCallback(early_stopping_patience=1)
    recipe = save_recipe(tmp_path, train={"eval_steps": 1, "max_steps": 6}, **better)
    run = surefoot.train(recipe, callbacks=[theirs], **{"train.load_best_model_at_end": True})
    again = {"output_dir": str(tmp_path / "other"), "early_stopping_patience": 1}
    ours = surefoot.train(recipe, train=again)
    assert run.global_step == ours.global_step > 1


class Sets:
    """Counts in ``args.a``; the other callback reads it."""

    def on_step_end(self, args, state, control):
        args.a = getattr(args, "a", 19) + 1


class Reads:
    def on_step_end(self, args, state, control):
        self.names = args.to_dict()
        assert args.learning_rate == 0.003
        assert args.logging_steps == 0
        assert args.eval_strategy == "steps"


def test_a_name_that_is_set_reaches_other_callbacks_and_a_resume(tmp_path):
    recipe, reads = save_recipe(tmp_path), Reads()
    surefoot.train(recipe, callbacks=[Sets, reads])
    assert reads.names["a"] == 23
    surefoot.train(recipe, callbacks=[Sets, reads], **{"train.max_steps": 6})
    assert (reads.names["a"], reads.names["max_steps"]) == (25, 6)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("learning_rate", 1.0, r"set optim\.learning_rate in the recipe"),
        ("model", None, "choose another name"),
        ("a", object(), "cannot be part of a checkpoint"),
    ],
)
def test_settings_and_parts_cannot_be_set(name, value, says, tmp_path):
    class Setting(TrainerCallback):
        def on_init_end(self, args, state, control):
            setattr(args, name, value)

    with pytest.raises(RecipeError, match=says):
        surefoot.train(save_recipe(tmp_path), callbacks=[Setting])


def test_the_callbacks_of_transformers_run(tmp_path, capsys):
    from transformers.integrations import TensorBoardCallback

    theirs = [transformers.PrinterCallback, transformers.ProgressCallback, TensorBoardCallback]
    recipe = save_recipe(tmp_path, train={"log_steps": 1, "output_dir": str(tmp_path / "run")})
    surefoot.train(recipe, callbacks=theirs)
    assert "'eval_loss'" in capsys.readouterr().out
    assert [*(tmp_path / "run").rglob("events.out.tfevents.*")]


def test_free_values_of_a_recipe_reach_callbacks_and_may_change_on_a_resume(tmp_path):
    seen = []

    class Sees(TrainerCallback):
        def on_train_begin(self, args, state, control):
            seen.append((args.team, args.limits["days"]))

    recipe = save_recipe(tmp_path)
    extra = {"team": "red", "limits": {"days": [1, 2]}}
    surefoot.train(recipe, callbacks=[Sees], train={"extra": extra})
    written = (tmp_path / "run" / "checkpoint-4" / "recipe.yaml").read_text()
    assert yaml.safe_load(written)["train"]["extra"] == extra
    changed = {"extra": {**extra, "team": "blue"}, "max_steps": 5}
    assert surefoot.train(recipe, callbacks=[Sees], train=changed).global_step == 5
    assert seen == [("red", [1, 2]), ("blue", [1, 2])]


@pytest.mark.parametrize("name", ["learning_rate", "world_size", "model"])
def test_a_free_value_with_a_name_of_args_is_refused_before_anything_is_loaded(name, tmp_path):
    recipe = save_recipe(tmp_path, model={"path": "nowhere"}, train={"extra": {name: 1.0}})
    with pytest.raises(RecipeError, match=rf"train\.extra\.{name}: .*choose another name"):
        surefoot.train(recipe)


def test_early_stopping_of_transformers_goes_on_counting_after_a_resume(tmp_path):
    """A patience of two, of which one is used when the run is interrupted."""

    def stops():
        return transformers.EarlyStoppingCallback(early_stopping_patience=2)

    settings = {"eval_steps": 1, "max_steps": 6, "load_best_model_at_end": True}
    worse = {"optim": {"adamw": {"learning_rate": 1e-30}}}  # no evaluation is better than the first
    recipe = save_recipe(tmp_path, train=settings, checkpoint={"save_steps": 1}, **worse)
    two = {"train.output_dir": str(tmp_path / "two")}
    surefoot.train(recipe, callbacks=[stops()], **two, **{"train.max_steps": 2})
    again = stops()
    assert surefoot.train(recipe, callbacks=[again], **two).global_step == 3
    assert again.early_stopping_patience_counter == 2
    assert surefoot.train(recipe, callbacks=[stops()]).global_step == 3


def test_args_say_where_a_callback_runs(tmp_path):
    class Sees(TrainerCallback):
        def on_init_end(self, args, state, control):
            self.place = args.process_index, args.local_rank, args.world_size, args.should_save
            assert args.device == next(args.model.parameters()).device
            with pytest.raises(RecipeError, match="part of the run"):
                args.device = "cpu"

    sees = Sees()
    surefoot.train(save_recipe(tmp_path), callbacks=[sees])
    assert sees.place == (0, 0, 1, True)


def test_a_callback_that_is_popped_is_not_called_again(tmp_path):
    seen, other = small.Seen(), small.Seen()
    trainer = small.trainer(tmp_path, seen, other)
    assert trainer.callbacks.pop(small.Seen) is seen
    assert trainer.callbacks.pop(small.Seen()) is None
    trainer.fit()
    assert (seen.events, bool(other.events)) == ([], True)
