"""Objects that a program hands over: each argument x odd objects, at the door."""

import inspect
import io
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import (
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    LlamaForCausalLM,
    TrainingArguments,
)

import surefoot
from folders import save_data, save_recipe
from surefoot.batch import Loss
from surefoot.errors import DataError, RecipeError, RunError, SurefootError
from surefoot.run import training_run
from surefoot.training import TrainerCallback

ROWS = [{"instruction": f"{n}+1?", "output": f"{n + 1}"} for n in range(8)]


class ReachedError(Exception):
    """All that was given has come through the door."""


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("given")
    path = save_recipe(folder, data={"val_size": 0}, train={"eval_steps": None})
    save_data(folder / "data", rows=ROWS)
    return path


class Failing:
    """Rows of a program that fails at its third."""

    def __getitem__(self, index):
        if index == 2:
            raise KeyError("no such row")
        return ROWS[index]


class WithoutArguments(TrainerCallback):
    def on_step_end(self):
        pass


class WithSettings(TrainerCallback):
    def __init__(self, folder):
        self.folder = folder


class Plain:
    def on_step_end(self, args, state, control, **more):
        pass


def cyclic():
    row = {}
    row["row"] = row
    return [row]


OBJECTS = {
    "None": lambda _: None,
    "a number": lambda _: 5,
    "a text": lambda _: "text",
    "bytes": lambda _: b"bytes",
    "a missing path": lambda folder: folder / "nowhere",
    "an empty list": lambda _: [],
    "a list of numbers": lambda _: [1, 2],
    "nested lists": lambda _: [[[1]]],
    "an empty mapping": lambda _: {},
    "a mapping of numbers": lambda _: {1: 2},
    "a mapping of rows by a number": lambda _: {1: ROWS},
    "a mapping to nothing": lambda _: {"easy": None},
    "a class": lambda _: LlamaForCausalLM,
    "a class of callbacks": lambda _: Plain,
    "a callback with settings": lambda _: WithSettings,
    "a callback of no arguments": lambda _: [WithoutArguments()],
    "an object": lambda _: object(),
    "a namespace": lambda _: SimpleNamespace(a=1),
    "a function": lambda _: print,
    "a lambda": lambda _: lambda: 5,
    "a module": lambda _: torch.nn.Linear(2, 2),
    "a tensor": lambda _: torch.ones(3),
    "an optimizer": lambda _: torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]),
    "a loader of batches": lambda _: DataLoader(ROWS, batch_size=2),
    "rows that fail": lambda _: Failing(),
    "rows in a circle": lambda _: cyclic(),
    "rows of tensors": lambda _: [{"instruction": torch.ones(2), "output": "a"}],
    "rows": lambda _: ROWS,
    "an open file": lambda _: io.StringIO("a"),
    "arguments of transformers": lambda folder: TrainingArguments(str(folder), use_cpu=True),
    "a collator of transformers": lambda _: DataCollatorForLanguageModeling(mlm=False, tokenizer=0),
    "a generator that fails": lambda _: (1 / n for n in range(3)),
    "a complex number": lambda _: 1j,
}
DOORS = {
    "recipe": lambda recipe, given: surefoot.train(given),
    **{
        name: lambda recipe, given, name=name: surefoot.train(recipe, **{name: given})
        for name in inspect.signature(surefoot.train).parameters
        if name not in ("recipe", "overrides")
    },
    "a section": lambda recipe, given: surefoot.train(recipe, train=given),
    "a setting": lambda recipe, given: surefoot.train(recipe, **{"train.max_steps": given}),
    "a stage": lambda recipe, given: surefoot.train(recipe, stage=given),
    "loss": lambda recipe, given: surefoot.StageParts(loss=given),
    "collate": lambda recipe, given: surefoot.StageParts(collate=given),
    "metrics": lambda recipe, given: surefoot.StageParts(metrics=given),
    "Trainer": lambda recipe, given: surefoot.Trainer(given),
    "Trainer.callbacks": lambda recipe, given: surefoot.Trainer(recipe, callbacks=given),
    "Trainer.processing_class": lambda recipe, given: surefoot.Trainer(
        recipe, processing_class=given
    ),
    "Trainer.add_callback": lambda recipe, given: surefoot.Trainer(recipe).add_callback(given),
}


@pytest.mark.parametrize("door", DOORS)
def test_whatever_is_handed_over_is_taken_or_refused_at_the_door(
    door, project, tmp_path, monkeypatch
):
    def joined(_):
        raise ReachedError

    monkeypatch.setattr(training_run, "joined", joined)
    monkeypatch.chdir(tmp_path)
    walked, refused = 0, 0
    for name, make in OBJECTS.items():
        try:
            DOORS[door](project, make(tmp_path))
        except ReachedError:
            pass
        except SurefootError as error:
            assert str(error), name
            refused += 1
        except Exception as error:
            pytest.fail(f"{name}: {type(error).__name__}: {error}")
        walked += 1
    assert walked == len(OBJECTS) == 33
    assert door == "trust_pickle" or refused > 10


def loss(outputs, batch):
    return Loss(-outputs.logps.sum(), outputs.logps.new_tensor(outputs.logps.numel()))


@pytest.mark.parametrize(
    ("given", "kind", "said"),
    [
        ({"callbacks": 5}, RecipeError, "callbacks: int has no method of an event"),
        ({"callbacks": WithoutArguments}, RecipeError, r"on_step_end: it is called with \(args, s"),
        ({"parts": loss}, RecipeError, "parts: expected a surefoot.StageParts, got a function"),
        ({"train_datasets": ROWS}, RecipeError, "did you mean train_dataset"),
        ({"train_dataset": 5}, DataError, "train_dataset: expected rows, got int 5"),
        ({"train_dataset": "a.jsonl"}, DataError, "name a file in data.datasets"),
        ({"train_dataset": Failing()}, DataError, r"train_dataset: row 2: .*KeyError"),
        ({"tokenizer": 5}, SurefootError, "tokenizer: expected a tokenizer of transformers"),
    ],
)
def test_the_error_names_the_argument_and_the_way(given, kind, said, project):
    with pytest.raises(kind, match=said):
        surefoot.train(project, **given)


def test_the_tokenizer_of_a_processor_is_named(project):
    known = AutoTokenizer.from_pretrained(project.parent / "model")
    with pytest.raises(SurefootError, match=r"SimpleNamespace; give its .tokenizer"):
        surefoot.train(project, tokenizer=SimpleNamespace(tokenizer=known))


def test_a_collator_of_transformers_is_refused_with_the_call_that_it_cannot_take(project):
    known = AutoTokenizer.from_pretrained(project.parent / "model")
    known.pad_token = known.eos_token
    with pytest.raises(RecipeError, match=r"parts: collate: it is called with \(features, packing"):
        surefoot.StageParts(collate=DataCollatorForLanguageModeling(known, mlm=False))


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"collate": lambda features, packing: {}}, "collate: expected a surefoot.batch.Batch"),
        ({"loss": lambda o, b: Loss(o.logps.sum(), 3)}, "loss: weight: expected a tensor"),
        ({"loss": lambda o, b: Loss(o.logps, o.logps)}, "loss: total: expected a tensor of one"),
        ({"metrics": lambda o, b: 3}, "metrics: expected tensors by name, got a int"),
        ({"metrics": lambda o, b: {"a": 3.0}}, "metrics: a: expected a tensor of one number"),
    ],
)
def test_what_a_function_gives_is_checked_at_its_first_call(parts, said, project, tmp_path):
    more = {"output_dir": str(tmp_path / "run"), "max_steps": 1, "eval_steps": 1}
    with pytest.raises(RunError, match=said):
        surefoot.train(
            project, train=more, eval_dataset=ROWS[:2], parts=surefoot.StageParts(**parts)
        )
