"""Objects of a program in place of names in a recipe; what comes back can be used."""

import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path

import datasets
import numpy as np
import pandas
import pytest
import torch
from peft import get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import surefoot
from each import some
from folders import save_data, save_recipe
from surefoot.batch import Loss
from surefoot.data.section import DataSection
from surefoot.data.text.collation import collate
from surefoot.errors import DataError, ModelError, RecipeError, RunError
from surefoot.methods import METHODS, Full
from surefoot.optim import OPTIMIZERS
from surefoot.optim._variants.adamw import AdamW
from surefoot.optim.state_tensor import LIKE_PARAMETER
from surefoot.recipe.recipe import load
from surefoot.run.from_python import with_rows
from surefoot.stages import SFT, STAGES
from surefoot.training import TrainerCallback
from surefoot.use import open_model

ROWS = [{"instruction": f"{a}+{b}?", "output": f"{a + b}"} for a in range(4) for b in range(6)]
FORMS = {
    "messages": [
        {
            "messages": [
                {"role": "user", "content": row["instruction"]},
                {"role": "assistant", "content": row["output"]},
            ]
        }
        for row in ROWS
    ],
    "prompt and completion": [
        {"prompt": row["instruction"], "completion": row["output"]} for row in ROWS
    ],
    "question and answer": [
        {"question": row["instruction"], "answer": row["output"]} for row in ROWS
    ],
    "messages as prompt": [
        {
            "prompt": [{"role": "user", "content": row["instruction"]}],
            "completion": [{"role": "assistant", "content": row["output"]}],
        }
        for row in ROWS
    ],
    "datasets.Dataset": datasets.Dataset.from_list(ROWS).with_format("numpy"),
    "columns": {name: [row[name] for row in ROWS] for name in ("instruction", "output")},
    "pandas.DataFrame": pandas.DataFrame(ROWS),
    "a generator": None,
}


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("python")
    path = save_recipe(folder, data={"val_size": 0}, train={"eval_steps": None})
    save_data(folder / "data", rows=ROWS)
    return path


@pytest.fixture(scope="module")
def usual(project, tmp_path_factory):
    """The run of the recipe as it is."""
    return surefoot.train(project, train={"output_dir": str(tmp_path_factory.mktemp("usual"))})


def settings(folder, **more):
    return {"train": {"output_dir": str(folder / "run"), **more}}


def assert_same(one, other):
    theirs = other.state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in one.state_dict().items())


@pytest.mark.parametrize("form", some(FORMS, ["messages", "columns", "a generator"]))
def test_rows_in_memory_train_as_those_of_files_do(project, usual, tmp_path, form):
    extra = {"difficulty": np.float32(0.5)}
    rows = FORMS[form] if form != "a generator" else ({**row, **extra} for row in ROWS)
    found = surefoot.train(project, **settings(tmp_path), train_dataset=rows)
    assert_same(found.model, usual.model)
    recipe = load(tmp_path / "run/recipe.yaml")
    assert recipe.data.datasets == ("train_dataset",)
    file = Path(recipe.data.datasets[0].source["file_name"])
    assert file.parent.parent == tmp_path / "run"


def test_what_a_frame_has_no_value_for_is_null(tmp_path):
    frame = pandas.DataFrame([{**ROWS[0], "score": 1.5}, ROWS[1]])
    found = with_rows(DataSection(datasets=("x",)), {"x": frame}, tmp_path)
    file = Path(found.datasets[0].source["file_name"])
    assert [json.loads(line)["score"] for line in file.read_text().splitlines()] == [1.5, None]


def test_a_model_and_a_tokenizer_may_be_folders(project, usual, tmp_path):
    folder = load(project).model.path
    found = surefoot.train(project, **settings(tmp_path), model=folder, tokenizer=Path(folder))
    assert_same(found.model, usual.model)
    with pytest.raises(ModelError, match=r"tokenizer: no tokenizer in '.*nowhere'"):
        surefoot.train(project, **settings(tmp_path), tokenizer=tmp_path / "nowhere")


def test_other_rows_are_another_run(project, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    surefoot.train(project, **settings(tmp_path, max_steps=1), train_dataset=ROWS)
    again = surefoot.train(project, **settings(tmp_path, max_steps=2), train_dataset=ROWS)
    assert again.global_step == 2
    without_program = surefoot.train(tmp_path / "run/recipe.yaml", **{"train.max_steps": 3})
    assert without_program.global_step == 3
    assert "train.max_steps: 1 -> 2 since the last start: the learning rates follow" in caplog.text
    with pytest.raises(RunError, match="a run with other settings"):
        surefoot.train(project, **settings(tmp_path, max_steps=4), train_dataset=ROWS[:-1])


def test_rows_to_evaluate_on_join_the_datasets_of_the_recipe(project, tmp_path):
    class Modes(TrainerCallback):
        seen = ()

        def on_step_end(self, args, state, control):
            self.seen += (("step", args.model.training),)

        def on_evaluate(self, args, state, control, metrics):
            self.seen += (("evaluate", args.model.training),)

    more, modes = settings(tmp_path, eval_steps=1, max_steps=2), Modes()
    found = surefoot.train(project, **more, eval_dataset=ROWS[:3], callbacks=[modes])
    # as in transformers' Trainer: what a callback generates there has no dropout
    assert modes.seen == (("step", True), ("evaluate", False)) * 2
    assert "eval_train_dataset_loss" not in found.log_history[-1]
    assert found.log_history[-1]["eval_loss"] > 0


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([], "train_dataset: has no rows"),
        (["text"], "train_dataset: row 0: expected a mapping of columns"),
        ({"prompt": ["a"], "completion": ["b", "c"]}, "prompt: 1 values, completion: 2 values"),
        ([ROWS[0], {"instruction": {1, 2}}], "train_dataset: row 1: .*set"),
        ([{"a": 1, "b": 2}], "its columns are a, b; expected one of these forms"),
        (datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS)), "take one of: train"),
    ],
)
def test_what_are_no_rows_is_refused(project, tmp_path, rows, problem):
    with pytest.raises(DataError, match=problem):
        surefoot.train(project, **settings(tmp_path), train_dataset=rows)


def test_a_model_and_a_tokenizer_in_memory_are_trained_as_if_they_were_a_folder(
    project, usual, tmp_path, caplog
):
    folder = project.parent / "model"
    model = AutoModelForCausalLM.from_pretrained(folder)
    plain = json.loads(project.read_text())
    del plain["model"], plain["data"]["datasets"]
    given = {"model": model, "tokenizer": AutoTokenizer.from_pretrained(folder)}
    with caplog.at_level(logging.INFO, "surefoot"):
        found = surefoot.train(plain, **settings(tmp_path), **given, train_dataset=ROWS)
    assert "a copy of the given object is trained" in caplog.text
    assert_same(found.model, usual.model)
    assert_same(model, found.model)  # the object has the trained weights
    again = surefoot.train(plain, **settings(tmp_path), **given, train_dataset=ROWS)
    assert again.global_step == 4
    with torch.no_grad():
        model.lm_head.weight.add_(1)
    with pytest.raises(RunError, match=r"other settings \(model.path"):
        surefoot.train(plain, **settings(tmp_path), **given, train_dataset=ROWS)


def test_an_adapter_of_a_model_in_memory_opens_by_itself(project, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(project.parent / "model")
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)  # so it is in no folder
    overrides = settings(tmp_path) | {"method": "lora", "model.path": "given as an object"}
    found = surefoot.train(project, **overrides, model=model)
    ids = torch.arange(60, 92)[None]
    with torch.no_grad():
        expected = found.model(ids).logits
        opened = open_model(tmp_path / "run").model(ids).logits
    assert torch.allclose(opened, expected, atol=1e-5)


def test_a_tokenizer_alone_replaces_that_of_the_folder(project, tmp_path):
    known = AutoTokenizer.from_pretrained(project.parent / "model")
    known.chat_template = known.chat_template.replace("'\\n'", "': '")
    found = surefoot.train(project, **settings(tmp_path, max_steps=1), tokenizer=known)
    assert found.tokenizer.chat_template == known.chat_template
    assert (tmp_path / "run/checkpoint-1/chat_template.jinja").read_text() == known.chat_template


@pytest.mark.parametrize("kind", ["adapter", "module"])
def test_what_is_no_model_of_transformers_is_refused(project, tmp_path, kind):
    from peft import LoraConfig

    model = torch.nn.Linear(2, 2)
    if kind == "adapter":
        base = AutoModelForCausalLM.from_pretrained(project.parent / "model")
        model = get_peft_model(base, LoraConfig(target_modules="all-linear"))
    overrides = settings(tmp_path) | {"model.path": "given as an object"}
    with pytest.raises(ModelError, match=r"model: .* cannot be trained"):
        surefoot.train(
            project,
            **overrides,
            model=model,
            tokenizer=AutoTokenizer.from_pretrained(project.parent / "model"),
        )


def plain_loss(outputs, batch):
    return Loss(-outputs.logps.sum(), outputs.logps.new_tensor(outputs.logps.numel()))


def doubled(outputs, batch):
    found = plain_loss(outputs, batch)
    return Loss(2 * found.total, found.weight)


def rank_of_label(outputs, batch):
    return {"surprise": -outputs.logps.sum(), "right": (outputs.logps > -1).sum()}


def test_a_loss_of_ones_own_is_minimized_measured_and_remembered(project, tmp_path):
    parts = surefoot.StageParts(loss=plain_loss)
    runs = {
        name: surefoot.train(
            project, **settings(tmp_path / name, log_steps=1), parts=surefoot.StageParts(loss=loss)
        )
        for name, loss in (("own", plain_loss), ("stage", None), ("double", doubled))
    }
    losses = {
        name: [log["loss"] for log in run.log_history if "loss" in log]
        for name, run in runs.items()
    }
    assert losses["own"] == pytest.approx(losses["stage"], rel=1e-5)
    assert losses["double"][0] == pytest.approx(2 * losses["stage"][0], rel=1e-5)
    more = {"train.max_steps": 5}
    with pytest.raises(RunError, match="was trained with a loss given from Python"):
        surefoot.train(tmp_path / "own/run/recipe.yaml", **more)
    assert surefoot.train(tmp_path / "own/run/recipe.yaml", **more, parts=parts).global_step == 5


def test_metrics_of_ones_own_are_means_over_the_tokens_of_an_evaluation(project, tmp_path):
    more = settings(tmp_path, eval_steps=2, max_steps=2)
    parts = surefoot.StageParts(metrics=rank_of_label)
    found = surefoot.train(project, **more, eval_dataset=ROWS[:5], parts=parts)
    last = found.log_history[-1]
    assert last["eval_surprise"] == pytest.approx(last["eval_loss"], rel=1e-5)
    assert 0 <= last["eval_right"] <= 1
    assert last["eval_perplexity"] == pytest.approx(np.exp(last["eval_loss"]), rel=1e-5)


def test_a_collation_of_ones_own_makes_the_batches(project, usual, tmp_path):
    seen = []

    def mine(features, *, packing):
        seen.append(len(features))
        return collate(features, packing=packing)

    parts = surefoot.StageParts(collate=mine)
    found = surefoot.train(project, **settings(tmp_path), parts=parts)
    assert sum(seen) >= 16
    assert_same(found.model, usual.model)


def test_a_loss_that_gives_no_loss_or_reads_what_does_not_exist_is_refused(project, tmp_path):
    parts = surefoot.StageParts(loss=lambda _outputs, _batch: 1.0)
    with pytest.raises(RunError, match=r"expected a surefoot.batch.Loss\(total, weight\), got flo"):
        surefoot.train(project, **settings(tmp_path), parts=parts)
    parts = surefoot.StageParts(loss=plain_loss, loss_outputs=("logits",))
    with pytest.raises(RecipeError, match=r"loss_outputs: .*'logits'"):
        surefoot.train(project, **settings(tmp_path), parts=parts)


@dataclass(frozen=True, kw_only=True)
class Halved(SFT):
    share: float = 0.5

    def loss(self, role, outputs, batch):
        found = super().loss(role, outputs, batch)
        return Loss(self.share * found.total, found.weight, found.metrics)


def test_a_stage_of_ones_own_is_given_as_an_instance(project, usual, tmp_path, monkeypatch):
    monkeypatch.setitem(STAGES.own, "Halved", None)
    del STAGES.own["Halved"]  # as before the test, and again after it
    found = surefoot.train(project, **settings(tmp_path, log_steps=1), stage=Halved(share=1.0))
    assert_same(found.model, usual.model)
    assert load(tmp_path / "run/recipe.yaml").stage == Halved(share=1.0)


@dataclass(frozen=True, kw_only=True)
class SignDescent(AdamW):
    """The sign of a running mean of gradients, with a state of its own."""

    state_tensors = {"momentum": LIKE_PARAMETER}

    def build(self, named, layouts=None):
        return Signs(self.groups(named, {}), lr=self.learning_rate)


class Signs(torch.optim.Optimizer):
    def __init__(self, groups, lr):
        super().__init__(groups, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state.setdefault("momentum", torch.zeros_like(parameter))
                    state["momentum"].lerp_(parameter.grad, 0.1)
                    parameter.sub_(state["momentum"].sign(), alpha=group["lr"])


@dataclass(frozen=True, kw_only=True)
class LastLayer(Full):
    """Tune the last layer alone."""

    depth: int = 1
    """Layers from the end."""

    def apply(self, model):
        model.requires_grad_(False)
        model.model.layers[-self.depth :].requires_grad_(True)
        return model


@pytest.mark.parametrize(
    ("name", "choices", "made"),
    [
        ("optim", OPTIMIZERS, SignDescent(learning_rate=1e-3, schedule="constant")),
        pytest.param("method", METHODS, LastLayer(depth=1), marks=pytest.mark.proof),
    ],
)
def test_an_optimizer_or_method_of_ones_own_trains_and_resumes(
    project, usual, tmp_path, monkeypatch, name, choices, made
):
    monkeypatch.setitem(choices.own, type(made).__name__, None)
    del choices.own[type(made).__name__]  # as before the test, and again after it
    changes = {name: made} | ({"optim.adamw.schedule": "constant"} if name == "method" else {})
    whole = surefoot.train(project, **settings(tmp_path / "whole"), **changes)
    surefoot.train(project, **settings(tmp_path, max_steps=2), **changes)
    resumed = surefoot.train(project, **settings(tmp_path), **changes)
    assert_same(resumed.model, whole.model)
    theirs = dict(usual.model.named_parameters())
    assert any(not torch.equal(p, theirs[n]) for n, p in whole.model.named_parameters())
    assert type(made).__name__ in (tmp_path / "run/recipe.yaml").read_text()


@dataclass(frozen=True, kw_only=True)
class Plain:
    learning_rate: float = 0.1


@pytest.mark.parametrize("kind", ["stage", "method", "optim"])
def test_a_class_of_ones_own_that_lacks_members_is_refused_with_their_names(project, kind):
    missing = {"stage": "spec", "method": "saves_base_model", "optim": "bf16_weights"}[kind]
    with pytest.raises(RecipeError, match=rf"^{kind}: the class Plain has no .*\b{missing}\b"):
        surefoot.train(project, **{kind: Plain()})


def test_an_object_that_no_recipe_can_name_is_an_error_that_says_where_it_belongs(project):
    class Mine(TrainerCallback):
        pass

    recipe = load(project)
    recipe = replace(recipe, train=replace(recipe.train, callbacks=(Mine(),)))
    with pytest.raises(RecipeError, match=r"Mine is no class .* surefoot\.train"):
        surefoot.train(recipe)


def test_an_object_where_a_value_belongs_is_named_by_its_key(project):
    with pytest.raises(RecipeError, match=r"data.template: .*got an object of type object"):
        surefoot.train(project, **{"data.template": object()})


@pytest.mark.parametrize(
    ("packing", "method"), [(True, "full"), pytest.param(False, "lora", marks=pytest.mark.proof)]
)
def test_the_model_generates_in_a_callback_and_afterwards(project, tmp_path, packing, method):
    class Speaker(TrainerCallback):
        said = ends = None

        def on_step_end(self, args, state, control):
            if state.global_step == 2:
                self.said = speak(args.model)
                self.ends = args.model.generation_config.eos_token_id

    def speak(model):
        ids = torch.arange(60, 76)[None]
        return model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=5,
            do_sample=False,
            pad_token_id=0,
        )

    overrides = {"data.packing": packing, "method": method}
    speaker = Speaker()
    found = surefoot.train(project, **settings(tmp_path / "a"), **overrides, callbacks=[speaker])
    silent = surefoot.train(project, **settings(tmp_path / "b"), **overrides)
    assert_same(found.model, silent.model)  # nothing of training was changed by it
    assert speaker.said.shape[1] > 16
    assert not found.model.training
    assert torch.equal(speak(found.model), speak(open_model(tmp_path / "a/run").model))
    ends = found.model.generation_config.eos_token_id
    assert found.tokenizer.convert_tokens_to_ids("<|im_end|>") in ends
    assert speaker.ends == ends, "a response ends in a callback where it ends afterwards"


def test_a_run_that_is_complete_gives_its_best_model(project, tmp_path):
    more = settings(tmp_path, eval_steps=2, load_best_model_at_end=True, max_steps=4)
    more["optim"] = {"adamw": {"learning_rate": 0.5}}  # gets worse
    first = surefoot.train(project, **more, eval_dataset=ROWS[:3])
    again = surefoot.train(project, **more, eval_dataset=ROWS[:3])
    assert again.best_global_step == first.best_global_step
    assert_same(again.model, first.model)
