"""``surefoot.Trainer``: a run as an object, with the methods of transformers' Trainer."""

import json
import logging
from dataclasses import dataclass

import datasets
import peft
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments

import surefoot
from docs.pages import ROOT
from folders import save_data, save_model, save_recipe
from surefoot.errors import CheckpointError, DataError, RecipeError, RunError
from surefoot.training import Screen, TrainerCallback
from surefoot.use.trainer import INSTEAD

ROWS = [{"instruction": f"{a}+{b}?", "output": f"{a + b}"} for a in range(4) for b in range(6)]
TRAIN, HELD_OUT = ROWS[:18], ROWS[18:]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    save_model(folder)
    return folder


@pytest.fixture
def given(base, tmp_path):
    """What a script of the Trainer has: arguments, a model, a tokenizer and rows."""
    return {
        "args": arguments(tmp_path),
        "model": AutoModelForCausalLM.from_pretrained(base),
        "processing_class": AutoTokenizer.from_pretrained(base),
        "train_dataset": datasets.Dataset.from_list(TRAIN),
        "eval_dataset": HELD_OUT,
        "data": {"cutoff_len": 64},
        "generate": {"max_new_tokens": 4},
    }


def arguments(folder, **more):
    usual = {"per_device_train_batch_size": 2, "learning_rate": 3e-3, "max_steps": 4}
    usual |= {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "logging_steps": 1}
    usual |= {"report_to": "none", "use_cpu": True, "output_dir": str(folder / "run")}
    return TrainingArguments(**usual | more)


def same(one, other):
    values = other.state_dict()
    return all(torch.equal(value, values[name]) for name, value in one.state_dict().items())


def loss_of(model, tokenizer, rows):
    """Nats per token of the responses, by transformers alone."""
    total = count = 0
    for row in rows:
        messages = [
            {"role": "user", "content": row["instruction"]},
            {"role": "assistant", "content": row["output"]},
        ]
        found = tokenizer.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True, return_tensors="pt"
        )
        labels = found["input_ids"].masked_fill(found["assistant_masks"] == 0, -100)
        number = int((labels[:, 1:] != -100).sum())
        with torch.no_grad():
            total += float(model(found["input_ids"], labels=labels).loss) * number
        count += number
    return total / count


def test_a_script_of_the_trainer_runs(given, tmp_path):
    """Its arguments, a name set in them, train, evaluate, save_model; the model that was given is
    trained, by what transformers says of it."""
    seen = []

    class Sees(TrainerCallback):
        def on_init_end(self, args, state, control):
            seen.append((args.a, args.logging_steps))

    trainer = surefoot.Trainer(**given, callbacks=[Sees])
    trainer.args.a = 20
    model, tokenizer = given["model"], given["processing_class"]
    assert trainer.model is model
    first = trainer.evaluate()["eval_loss"]
    assert first == pytest.approx(loss_of(model, tokenizer, HELD_OUT), rel=1e-5)
    run = trainer.train()
    assert seen == [(20, 1)]
    assert (trainer.args.a, trainer.state.global_step, run.global_step) == (20, 4, 4)
    assert same(model, trainer.model)
    last = trainer.evaluate()["eval_loss"]
    assert last == run.log_history[-1]["eval_loss"] < first
    assert last == pytest.approx(loss_of(model, tokenizer, HELD_OUT), rel=1e-5)
    trainer.save_model(tmp_path / "saved")
    assert same(AutoModelForCausalLM.from_pretrained(tmp_path / "saved"), model)
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").chat_template
    state = json.loads((tmp_path / "run/checkpoint-4/state.json").read_text())
    assert '"a": 20' in json.dumps(state)


def test_the_object_trains_as_the_function_does(given, base, tmp_path):
    trainer = surefoot.Trainer(**given)
    trainer.train()
    given["args"] = arguments(tmp_path, output_dir=str(tmp_path / "other"))
    given["model"] = AutoModelForCausalLM.from_pretrained(base)
    given["tokenizer"] = given.pop("processing_class")
    assert same(surefoot.train(given.pop("args"), **given).model, trainer.model)


def test_an_evaluation_in_a_callback_changes_nothing(given, base, tmp_path):
    plain = surefoot.Trainer(**given).train()
    figures = {}

    class Evaluates:
        def on_step_end(self, args, state, control):
            figures.update(trainer.evaluate(TRAIN[:4], metric_key_prefix="train"))
            assert set(trainer.evaluate({"x": TRAIN[:2], "y": HELD_OUT})) > {"eval_x_loss"}

        def on_evaluate(self, args, state, control, metrics):
            assert not any(name.startswith("train") for name in metrics)

    given |= {"args": arguments(tmp_path, output_dir=str(tmp_path / "other"))}
    given |= {"model": AutoModelForCausalLM.from_pretrained(base)}
    trainer = surefoot.Trainer(**given, callbacks=[Evaluates])
    assert same(trainer.train().model, plain.model)
    trainer.evaluate(TRAIN[:4])
    assert figures["train_loss"] > 0
    assert len(trainer.state.log_history) == len(plain.log_history)


def test_rows_are_answered_in_their_order_and_measured_if_they_have_responses(given):
    trainer = surefoot.Trainer(**given)
    trainer.train()
    found = trainer.predict(HELD_OUT)
    assert len(found.predictions) == len(HELD_OUT)
    assert found.metrics["test_loss"] == pytest.approx(trainer.evaluate()["eval_loss"], rel=1e-5)
    alone = trainer.predict([{"instruction": HELD_OUT[-1]["instruction"]}])
    assert (alone.predictions, alone.metrics) == (found.predictions[-1:], {})
    with pytest.raises(DataError, match="no row has a response"):
        trainer.evaluate([{"instruction": "1+1?"}])


def test_a_model_is_saved_to_a_new_folder_an_adapter_by_itself(given, base, tmp_path):
    trainer = surefoot.Trainer(**given, method="lora")
    trainer.train()
    trainer.save_model(tmp_path / "saved")
    opened = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base), tmp_path / "saved"
    )
    ids = torch.arange(60, 92)[None]
    with torch.no_grad():
        assert torch.allclose(opened(ids).logits, trainer.model(ids).logits, atol=1e-5)
    with pytest.raises(CheckpointError, match="it exists already"):
        trainer.save_model(tmp_path / "saved")
    with pytest.raises(CheckpointError, match="folder of the run"):
        trainer.save_model(tmp_path / "run")


def test_a_given_model_that_does_not_fit_is_said_not_to_be_trained(given, caplog):
    for name, parameter in given["model"].named_parameters():
        parameter.requires_grad = "lm_head" in name
    before = {name: value.clone() for name, value in given["model"].state_dict().items()}
    surefoot.Trainer(**given, method="lora").train()
    assert "the given object is not trained" in caplog.text
    assert "requires_grad of the given object is not read" in caplog.text
    assert all(torch.equal(x, before[name]) for name, x in given["model"].state_dict().items())


def test_a_cell_that_is_executed_again_is_the_same_run(given, tmp_path):
    first = surefoot.Trainer(**given).train()
    again = surefoot.Trainer(**given)
    assert same(again.train().model, first.model)
    assert len([*(tmp_path / "run").glob("base-model-*")]) == 1


def test_a_run_is_resumed_from_the_checkpoint_that_is_named(given, base, tmp_path):
    surefoot.Trainer(**given).train()
    given |= {"args": arguments(tmp_path, output_dir=str(tmp_path / "other"))}
    given |= {"model": AutoModelForCausalLM.from_pretrained(base)}
    steps = []

    class Counts:
        def on_step_end(self, args, state, control):
            steps.append(state.global_step)

    trainer = surefoot.Trainer(**given, callbacks=Counts)
    trainer.train(resume_from_checkpoint=tmp_path / "run/checkpoint-2")
    assert steps == [3, 4]
    with pytest.raises(RunError, match=r"checkpoint\.resume is none"):
        trainer.train(resume_from_checkpoint=False)


@pytest.mark.parametrize("removed", [Screen, transformers.ProgressCallback])
def test_a_printer_takes_the_place_of_ours(removed, given, caplog, capsys):
    caplog.set_level(logging.INFO, "surefoot")
    trainer = surefoot.Trainer(**given)
    trainer.remove_callback(removed)
    trainer.add_callback(transformers.PrinterCallback)
    trainer.train()
    assert "'loss'" in capsys.readouterr().out
    assert not [line for line in caplog.messages if line.startswith("step=")]


def test_callbacks_come_and_go(given):
    calls = []

    class Calls:
        def on_step_end(self, args, state, control):
            calls.append(state.global_step)
            if state.global_step == 2:
                assert trainer.pop_callback(Calls) is self

    with pytest.raises(RecipeError, match="no method of an event"):
        surefoot.Trainer(**given, callbacks=[object()])
    trainer = surefoot.Trainer(**given)
    trainer.remove_callback(Calls)  # there is none yet: it is no reason to remove the next
    trainer.add_callback(Calls())
    trainer.remove_callback(calls)  # which is none
    trainer.train()
    assert calls == [1, 2]


@pytest.mark.parametrize("name", ["compute_loss", "get_train_dataloader", "_save_checkpoint"])
def test_a_method_that_nothing_would_call_is_refused_with_what_is_in_its_place(name):
    with pytest.raises(RecipeError, match=f"Mine.{name}: nothing calls it; use") as error:
        type("Mine", (surefoot.Trainer,), {name: lambda self: None})
    assert INSTEAD[name] in str(error.value)
    with pytest.raises(AttributeError, match=INSTEAD["save_metrics"]):
        _ = object.__new__(surefoot.Trainer).save_metrics


def test_the_page_has_every_method_with_what_is_in_its_place():
    page = (ROOT / "docs/how-to/from-the-trainer.md").read_text()
    missing = [name for name in INSTEAD if f"`{name}`" not in page]
    assert not missing


def test_what_can_be_added_in_a_class_is_called(given, tmp_path):
    class Mine(surefoot.Trainer):
        def save_model(self, output_dir):
            super().save_model(output_dir)
            (output_dir / "mine.txt").write_text(str(self.state.global_step))

    Mine(**given).save_model(tmp_path / "saved")
    assert (tmp_path / "saved/mine.txt").read_text() == "0"


def test_fields_of_a_class_of_arguments_are_free_values(given, tmp_path):
    @dataclass
    class Mine(TrainingArguments):
        team: str = "red"

    usual = {"output_dir": str(tmp_path / "run"), "report_to": "none", "use_cpu": True}
    given["args"] = Mine(team="blue", max_steps=1, **usual)
    assert surefoot.Trainer(**given).args.team == "blue"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": None, "train_dataset": None}, r"give model=\.\.\., train_dataset=\.\.\., too"),
        ({"eval_dataset": None}, r"give eval_dataset=\.\.\., too"),
        ({"data_collator": print}, r"data_collator: not taken; use .*StageParts\(collate"),
        ({"args": AutoTokenizer}, "or TrainingArguments, got a type"),
        ({"eval_dataset": {"a/b": ROWS}}, "'a/b' cannot be the name of a dataset"),
    ],
)
def test_what_is_missing_or_not_taken_is_named(changes, says, given):
    with pytest.raises((RecipeError, DataError), match=says):
        surefoot.Trainer(**given | changes)


@pytest.mark.parametrize("form", ["dict", "DatasetDict"])
def test_several_datasets_are_evaluated_by_name(form, given):
    rows = {"a": HELD_OUT[:2], "b": {k: [row[k] for row in HELD_OUT] for k in HELD_OUT[0]}}
    if form == "DatasetDict":
        rows = datasets.DatasetDict(a=datasets.Dataset.from_list(HELD_OUT[:2]), b=rows["b"])
        rows["b"] = datasets.Dataset.from_dict(rows["b"])
    given["eval_dataset"] = rows
    last = surefoot.Trainer(**given).train().log_history[-1]
    assert last["eval_loss"] == pytest.approx((last["eval_a_loss"] + last["eval_b_loss"]) / 2)


def test_a_name_of_training_data_is_no_name_of_evaluation_data(tmp_path):
    trainer = surefoot.Trainer(
        save_recipe(tmp_path, data={"val_size": 0}), eval_dataset={"sums": HELD_OUT}
    )
    with pytest.raises(DataError, match="sums is a training dataset"):
        trainer.train()


def test_rows_that_a_reference_must_read_are_data_of_the_run(tmp_path):
    pairs = [{"instruction": "1+1?", "chosen": "2", "rejected": str(n)} for n in range(3, 9)]
    recipe = save_recipe(tmp_path, stage="dpo", data={"datasets": ["pairs"], "val_size": 0})
    save_data(tmp_path / "data", "pairs", pairs)
    info = tmp_path / "data/dataset_info.json"
    entry = {"file_name": "pairs.json", "ranking": True}
    info.write_text(json.dumps({"pairs": entry}))
    trainer = surefoot.Trainer(recipe, eval_dataset=pairs[:2])
    assert trainer.evaluate()["eval_loss"] == pytest.approx(0.6931, abs=1e-3)
    with pytest.raises(RunError, match="give the rows as eval_dataset of the Trainer"):
        trainer.evaluate(pairs[:2])


def test_a_model_that_is_not_open_yet_is_said_so(tmp_path):
    trainer = surefoot.Trainer(save_recipe(tmp_path))
    with pytest.raises(RunError, match="opened by train"):
        _ = trainer.model
    assert trainer.state.global_step == 0


def test_several_ranks_meet_in_train_alone(tmp_path, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    with pytest.raises(RunError, match=r"several ranks meet in train\(\) alone"):
        surefoot.Trainer(save_recipe(tmp_path)).evaluate()
