"""Callbacks as they are written for the Trainer of transformers."""

import math

import pytest
import transformers

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


def test_a_metric_that_is_not_finite_can_stop_a_run(tmp_path):
    class Stops(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            if math.isfinite(logs["loss"]):
                control.should_training_stop = True
            return control

    trainer = small.trainer(tmp_path, Stops())
    assert trainer.fit().global_step < trainer.state.max_steps
