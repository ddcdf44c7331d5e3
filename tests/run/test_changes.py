"""What a resume makes of a change: refused with a cure, said, or of no influence."""

import json
import logging
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import pytest
import torch

import small
import surefoot
from project import Project, checkpoints, final_weights, losses
from surefoot.errors import ModelError, RecipeError, RunError, SurefootError
from surefoot.optim import OPTIMIZERS
from surefoot.optim._variants.adamw import AdamW
from surefoot.recipe.comparison import changes, compare_with_checkpoint, refuse_in_own, say
from surefoot.recipe.recipe import greater_is_better, read
from surefoot.schema import FROM_HERE, KEPT
from surefoot.training.callback import TrainerState
from surefoot.training.evaluation import settle_best
from surefoot.training.section import TrainSection

SECTIONS = {
    "model": {"path": "unused"},
    "data": {"datasets": ["unused"]},
    "method": {"lora": {"rank": 4}},
    "stage": "sft",
    "train": {"output_dir": "/new/run"},
    "optim": {"adamw": {"learning_rate": 1e-3}},
}


@dataclass(frozen=True, kw_only=True)
class Planted(AdamW):
    """An optimizer of a package, whose settings say what their change means."""

    own: int = 1
    state: Annotated[int, KEPT] = 1
    later: Annotated[int, FROM_HERE] = 1


def recipe(**overrides):
    return read(SECTIONS, overrides)


def outcomes(before, now, tmp_path, caplog):
    """What is said in the run's own folder, and of its checkpoint in a new one."""
    found, said = changes(before, now), []
    own = (lambda: refuse_in_own(found, "run"), lambda: say(found, "the last start"))
    new = (
        lambda: compare_with_checkpoint(tmp_path, before, now, now.train.folder, "model.adapter"),
    )
    for steps in (own, new):
        caplog.clear()
        try:
            with caplog.at_level(logging.INFO):
                for step in steps:
                    step()
            said.append(caplog.text and "said")
        except RunError as error:
            said.append(str(error))
    return said


PLANTED = {"optim": {"planted": {"learning_rate": 1e-3}}}
EVALUATED = {"train.eval_steps": 2, "data.val_size": 0.1}
CHANGES = {
    "train.log_steps": (7, "", ""),
    "parallel.timeout": (60, "", ""),
    "train.micro_batch_size": (2, "said", "said"),
    "parallel.dp_shard": (2, "said", "said"),
    "train.max_steps": (9, "said", "said"),
    "train.metric_for_best_model": ("eval_token_accuracy", "said", "said"),
    "optim.adamw.learning_rate": (2e-3, "checkpoint.resume=PATH in a new folder", "said"),
    "method.lora.alpha": (64, "set method.lora.alpha to null", "set method.lora.alpha to null"),
    "method.lora.rslora": (True, "rslora to false", "remove checkpoint.resume, and set model.ad"),
    "optim": ("lion", "set optim to adamw", "set optim to adamw"),
    "method": ("oft", "set method to lora", "set method to lora"),
    "optim.planted.own": (2, "in a new folder", "said"),
    "optim.planted.state": (2, "set optim.planted.state to 1", "set optim.planted.state to 1"),
    "optim.planted.later": (2, "said", "said"),
}


@pytest.mark.parametrize("path", CHANGES)
def test_what_a_change_means_is_what_its_setting_says(path, tmp_path, caplog, monkeypatch):
    """In the run's own folder, and in a new one; ``planted`` is nobody's that the code knows."""
    monkeypatch.setitem(OPTIMIZERS.own, "planted", Planted)
    value, *expected = CHANGES[path]
    common = PLANTED if "planted" in path else EVALUATED if "metric" in path else {}
    found = outcomes(recipe(**common), recipe(**common, **{path: value}), tmp_path, caplog)
    for want, got in zip(expected, found, strict=True):
        assert want in got and (want or not got), found
        if want not in ("", "said"):
            assert f"{path}: " in got


def test_values_that_act_alike_and_names_of_one_place_are_no_change(tmp_path):
    assert not changes(recipe(), recipe(**{"method.lora.alpha": 8}))
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "rows.jsonl").touch()
    (tmp_path / "real" / "r.py").write_text("def f(completions): return [0.0] * len(completions)")
    (tmp_path / "link").symlink_to("real")

    def at(name):
        folder = tmp_path / name
        paths = {"path": str(folder)}, {"datasets": [str(folder / "rows.jsonl")]}
        data = {**paths[1], "dataset_dir": str(folder / "absent"), "media": {"folder": str(folder)}}
        stage = {"grpo": {"reward": f"{folder}/r.py:f", "reference": str(folder), "beta": 0.1}}
        return recipe(model=paths[0], data=data, stage=stage)

    assert not changes(at("real"), at("link"))
    shutil.copytree(tmp_path / "real", tmp_path / "copy")
    found = {change.path for change in changes(at("real"), at("copy"))}
    assert found >= {"model.path", "data.datasets", "stage.grpo.reward", "stage.grpo.reference"}


@dataclass(frozen=True)
class Writing:
    """A saver that has not committed the best step yet."""

    in_flight: Path

    def path_of(self, step):
        return self.in_flight.with_name(f"checkpoint-{step}")


def test_the_best_checkpoint_is_named_whether_or_not_it_is_written_already(tmp_path):
    trainer = replace(small.trainer(tmp_path), saver=Writing(tmp_path / "checkpoint-2"))
    trainer.state.global_step, trainer.state.best_global_step = 4, 2
    named = json.loads(trainer._state_file())["best_model_checkpoint"]
    assert named == str(tmp_path / "checkpoint-2")


STEPS = {1: (5.0, 0.3), 2: (3.0, 0.1), 3: (4.0, 0.2), 4: (3.5, float("nan"))}


def judged(rows="rows", saved=STEPS, state=None, **settings):
    """The state of a run after four evaluations, settled by ``settings``."""
    section = TrainSection(output_dir="run", **{"greater_is_better": False, **settings})
    history = [{"step": n, "eval_loss": a, "eval_acc": b} for n, (a, b) in STEPS.items()]
    state = state or TrainerState(global_step=4, log_history=history)
    settle_best(section, state, rows, saved.__contains__)
    return state


def test_the_best_is_that_of_the_log_by_the_metric_direction_and_rows_of_now(caplog):
    state = judged()
    assert (state.best_metric, state.best_global_step) == (3.0, 2)
    judged(state=state, metric_for_best_model="eval_acc", greater_is_better=True)
    assert (state.best_metric, state.best_global_step) == (0.3, 1)
    assert "checkpoint-2, the best so far, is not the best by eval_acc" in caplog.text
    judged(state=state, metric_for_best_model="eval_acc")
    assert (state.best_metric, state.best_global_step) == (0.1, 2)
    state.reductions.best = 0.1
    judged("others", state=state, metric_for_best_model="eval_acc")
    assert (state.best_metric, state.best_global_step, state.reductions.best) == (None, None, None)
    assert "what is evaluated, or what measures it, has changed since step 4" in caplog.text
    assert not state.evaluated("eval_loss")  # nor do they count for retention and early stopping


def test_a_best_checkpoint_that_is_missing_is_said_and_another_one_is_the_best(caplog):
    state = judged(load_best_model_at_end=True)
    judged(state=state, saved={1: 0, 3: 0}, load_best_model_at_end=True)
    assert state.best_global_step == 3
    assert "checkpoint-2, the best so far, is not in the folder of this run" in caplog.text
    judged(state=state, saved={}, load_best_model_at_end=True)
    assert state.best_global_step is None


@pytest.mark.parametrize(
    ("metric", "greater"),
    [
        ("eval_loss", False),
        ("eval_nll", False),
        ("eval_held_perplexity", False),
        ("eval_token_accuracy", True),
        ("eval_my_loss", None),
        ("eval_runtime", None),
    ],
)
def test_the_direction_of_a_metric_is_what_its_stage_says(metric, greater):
    data = {"datasets": ["unused"], "eval_datasets": ["held", "more"]}
    assert greater_is_better(recipe(data=data), metric) == greater
    reward = {"grpo": {"reward": "r.py:f"}}
    sampled = recipe(data=data, stage=reward)
    assert sampled.train.metric_for_best_model == "eval_reward" and greater_is_better(sampled)
    assert read(sampled, {"stage": "sft"}).train.metric_for_best_model == "eval_loss"


def test_a_metric_of_unknown_direction_is_refused_with_a_cure_that_works(tmp_path):
    settings = {"eval_steps": 1, "metric_for_best_model": "eval_router", "max_steps": 1}
    project = Project(tmp_path, data={"val_size": 4}, train=settings)
    with pytest.raises(
        RecipeError,
        match=r"no metric 'eval_router'; expected one of .*, say by train.greater_is_better",
    ):
        surefoot.train(project.recipe)
    with pytest.raises(RunError, match="no metric 'eval_router'"):
        surefoot.train(project.recipe, **{"train.greater_is_better": True})


HELPER = "def score(text):\n    return sum(map(ord, text)) % 7 / 7\n"
REWARD = (
    "def varied(completions):\n    from helper import score\n"
    "    return [score(completion) for completion in completions]\n"
)


@pytest.fixture(scope="module")
def sampled(tmp_path_factory):
    """A run of two steps whose reward imports a module when it is called, and that evaluates."""
    folder = tmp_path_factory.mktemp("sampled")
    stage = {"grpo": {"reward": "rewards.py:varied", "group_size": 2, "max_new_tokens": 4}}
    settings = {"max_steps": 2, "eval_steps": 1}
    data = {"datasets": ["sums"], "eval_datasets": ["held.jsonl"], "cutoff_len": 64}
    project = Project(folder, stage=stage, train=settings, data=data)
    rows = (folder / "data" / "sums.jsonl").read_text().splitlines(keepends=True)
    (folder / "held.jsonl").write_text("".join(rows[:4]))
    (folder / "rewards.py").write_text(REWARD)
    (folder / "helper.py").write_text(HELPER)
    project.sections["data"]["cache_dir"] = str(folder / "cache")
    project.write()
    surefoot.train(project.recipe)
    return project


def edited(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def spelt(tokenizer):
    decoder = tokenizer["decoder"]
    replaced = {"type": "Replace", "pattern": {"String": "e"}, "content": "E"}
    tokenizer["decoder"] = {"type": "Sequence", "decoders": [decoder, replaced]}


READ = {
    "model/generation_config.json": (
        lambda path: edited(path, lambda config: config.update(eos_token_id=[0, 5])),
        "what ends a response",
    ),
    "model/tokenizer.json": (lambda path: edited(path, spelt), "how tokens become text"),
    "helper.py": (lambda path: path.write_text(HELPER.replace("7", "5")), "helper.py has changed"),
    "held.jsonl": (
        lambda path: path.write_text("\n".join(reversed(path.read_text().splitlines()))),
        "what is evaluated, or what measures it, has changed since step 2",
    ),
    "model/unused.txt": (lambda path: path.write_text("unused"), ""),
}


@pytest.mark.parametrize("name", READ)
def test_what_a_run_reads_besides_is_refused_or_said_if_it_changed(name, sampled, tmp_path, caplog):
    """Of the base, of the rows to evaluate on, and of the modules of a reward."""
    change, words = READ[name]
    shutil.copytree(sampled.folder, tmp_path / "kept")
    path = sampled.folder / name
    try:
        change(path)
        said = ""
        try:
            surefoot.train(sampled.recipe, **{"train.max_steps": 3})
        except ModelError as error:
            said = str(error)
            assert "restore its files, or start a new run" in said
        messages = [record.getMessage() for record in caplog.records]
        said += " ".join(text for text in messages if "has changed since" in text)
        assert words in said and bool(words) == bool(said), said
        assert json.loads((checkpoints(sampled.run)[-1] / "state.json").read_text())["trainer"]
    finally:
        shutil.rmtree(sampled.folder)
        shutil.copytree(tmp_path / "kept", sampled.folder)


def other(value):
    """Another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return {str: f"{value}x", list: value[1:] if isinstance(value, list) else []}.get(
        type(value), {}
    )


def edits(path):
    """Ways to change a file: each value of a JSON object by itself, or the end of it."""
    data = path.read_bytes()
    if path.suffix == ".json":
        content = json.loads(data)
        for key, value in content.items():
            yield key, json.dumps({**content, key: other(value)}).encode()
            yield (
                f"without {key}",
                json.dumps({k: v for k, v in content.items() if k != key}).encode(),
            )
    elif path.suffix in (".py", ".jinja"):
        yield "comment", data + (b"# x" if path.suffix == ".py" else b"{# x #}")
    else:
        yield "end", data[:-4] + bytes([data[-4] ^ 1]) + data[-3:]


@pytest.mark.proof
def test_every_file_of_base_data_and_reward_is_refused_said_or_of_no_influence(
    sampled, tmp_path, caplog
):
    """Changed by itself, each value of it that can be, with a cold cache."""
    kept, found = shutil.copytree(sampled.folder, tmp_path / "kept"), {}
    surefoot.train(sampled.recipe, **{"train.max_steps": 3})
    whole = final_weights(sampled.run), losses(sampled.run)
    files = [*(kept / "model").iterdir(), *(kept / "data").iterdir(), *kept.glob("*.py")]
    for file in sorted([*files, kept / "held.jsonl"]):
        for what, data in edits(file):
            shutil.rmtree(sampled.folder)
            shutil.copytree(kept, sampled.folder)
            shutil.rmtree(sampled.folder / "cache")
            (sampled.folder / file.relative_to(kept)).write_bytes(data)
            caplog.clear()
            try:
                surefoot.train(sampled.recipe, **{"train.max_steps": 3})
                said = [r for r in caplog.records if "has changed since" in r.getMessage()]
                is_same = losses(sampled.run) == whole[1]
                is_same = is_same and equal(final_weights(sampled.run), whole[0])
                outcome = "said" if said else "same" if is_same else "SILENT"
            except SurefootError:
                outcome = "refused"
            except Exception as error:
                outcome = f"{type(error).__name__}: {error}"
            found[f"{file.relative_to(kept)}: {what}"] = outcome
    shutil.rmtree(sampled.folder)
    shutil.copytree(kept, sampled.folder)
    wrong = {k: v for k, v in found.items() if v not in ("refused", "said", "same")}
    assert not wrong and len(found) > 40, wrong


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_the_same_comparison_holds_for_a_checkpoint_that_is_named_in_the_runs_own_folder(tmp_path):
    project = Project(tmp_path, method={"lora": {"rank": 2}}, train={"max_steps": 2})
    surefoot.train(project.recipe)
    before = losses(project.run), (project.run / "recipe.yaml").read_text()
    named = {"checkpoint.resume": str(project.run / "checkpoint-2"), "train.max_steps": 3}
    for change in ({"method.lora.alpha": 9}, {"optim.adamw.learning_rate": 1.0}):
        with pytest.raises(RunError, match=f"other settings .{next(iter(change))}"):
            surefoot.train(project.recipe, **named, **change)
    assert before == (losses(project.run), (project.run / "recipe.yaml").read_text())
    fewer = {"train.output_dir": str(tmp_path / "new"), "train.max_steps": 2}
    with pytest.raises(RunError, match="of step 2, and this run is to end at step 2"):
        surefoot.train(project.recipe, **{**named, **fewer})
    (project.run / "latest").symlink_to("checkpoint-2")
    named["checkpoint.resume"] = str(project.run / "latest")
    assert surefoot.train(project.recipe, **named).global_step == 3
