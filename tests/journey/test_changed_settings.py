"""Every setting, changed alone between a stop and the resume: refused, said, or of no influence on
a single bit; and in a new folder refused clearly, or trained further."""

import logging
import shutil
import tempfile
import typing
from dataclasses import dataclass
from typing import Annotated

import pytest
import torch

import surefoot
from project import Project, final_weights, losses
from stage_data import DATASETS, SETTINGS, written
from surefoot import schema
from surefoot.errors import SurefootError
from surefoot.methods import METHODS
from surefoot.optim import OPTIMIZERS
from surefoot.optim._variants.adamw import AdamW
from surefoot.recipe.comparison import changes
from surefoot.recipe.recipe import load, read
from surefoot.schema import FREE
from surefoot.stages import STAGES

LORA = {"lora": {"rank": 2}}
METHOD = {"oft": {"oft": {"block_size": 8}}, "vera": {"vera": {"rank": 4}}, "lora": LORA}
METHOD |= {
    "llama_pro": {"llama_pro": {"num_new_layers": 1}},
    "freeze": {"freeze": {"num_layers": 1}},
}
# What reaches out of this process, or needs what is not here: their marks are checked, no run.
OUTSIDE = ("train.push_to_hub", "train.report_to", "train.webhook", "train.callbacks")
OUTSIDE += ("train.output_dir", "train.cache_dir", "checkpoint.resume", "model.compile")
# Values that no rule below finds.
OTHER = {
    "data.template": "chatml",
    "data.max_samples": 20,
    "data.cutoff_len": 48,
    "data.cache_dir": f"{tempfile.gettempdir()}/surefoot-elsewhere",
    "data.dataset_dir": "elsewhere",
    "data.interleave_probs": None,
    "data.chat_template_kwargs": {"reasoning_effort": "low"},
    "data.default_system": "Be kind.",
    "generate.stop": ["hen"],
    "model.eos_token": "<|im_end|>",
    "model.new_special_tokens": ["<new>"],
    "train.extra": {"mine": 1},
    "train.project": "mine",
    "train.run_name": "mine",
    "train.max_steps": 9,
    "parallel.timeout": 60,
}


def bases():
    evaluated = {"data": {"val_size": 4}, "train": {"eval_steps": 1}}
    yield "sft", {"method": LORA, "stage": "sft", **evaluated}
    for name in STAGES.own:
        if name != "sft":
            stage = written(name) if "reward" in SETTINGS.get(name, {}) else name
            stage = {name: SETTINGS[name]} if name == "distill" else stage
            yield (
                f"stage.{name}",
                {"stage": stage, "data": {"datasets": [DATASETS.get(name, "sums")]}},
            )
    for name in METHODS.own:
        if name != "lora":
            yield f"method.{name}", {"method": METHOD.get(name, name)}
    for name in OPTIMIZERS.own:
        settings = {"learning_rate": 1e-3, **({"rank": 4} if name in ("galore", "apollo") else {})}
        yield f"optim.{name}", {"optim": {name: settings}, "method": "full"}


BASES = dict(bases())


def leaves(section, path=()):
    """Every setting of a recipe that is no section: its path and itself."""
    for name, setting in schema.settings(type(section)).items():
        value, here = getattr(section, name), (*path, name)
        if setting.choices is not None:
            here = (*here, schema.variant_name(setting.choices, value))
        if schema.is_section(value):
            yield from leaves(value, here)
        else:
            yield ".".join(here), setting, value


def candidates(path, setting, value):
    """Other values of a setting, the likely ones first."""
    if path in OTHER:
        return [OTHER[path]]
    hints = typing.get_args(setting.hint) or (setting.hint,)
    texts = [x for hint in hints for x in (typing.get_args(hint) or [hint]) if isinstance(x, str)]
    found = [text for text in texts if text != value]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        found += [value + 1, value * 2, value / 2, 2, 4, 0.5, 0.1, 0.9]
    return [*found, 2, 1, 0.5, 0.1, "2", ["q_proj"], [1], {"q_proj": 2}, "x"]


def other_recipe(recipe, path, setting, value):
    """``recipe`` with another value at ``path``; None if none alone is valid."""
    for candidate in candidates(path, setting, value):
        try:
            changed = read(recipe, {path: candidate})
        except SurefootError:
            continue
        if changes(recipe, changed):
            return changed
    return None


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """For a base: its project, stopped after two of four steps, and the whole run beside it."""
    made = {}

    def of(name):
        if name not in made:
            folder = tmp_path_factory.mktemp("base")
            project = Project(folder, checkpoint={"save_steps": 2}, **BASES[name])
            project.sections["train"]["max_steps"] = 4
            project.sections["optim"] = BASES[name].get("optim", project.sections["optim"])
            project.write()
            surefoot.train(project.recipe)
            shutil.copytree(project.run, folder / "whole")
            shutil.rmtree(project.run / "checkpoint-4")
            shutil.copytree(project.run, folder / "stopped")
            made[name] = project
        return made[name]

    return of


def outcome(recipe, project, caplog, path, **overrides):
    """``refused``, ``said``, ``same``, or what is wrong."""
    caplog.clear()
    try:
        with caplog.at_level(logging.INFO):
            surefoot.train(recipe, **overrides)
    except SurefootError as error:
        return "refused" if str(error) else "an empty refusal"
    except Exception as error:  # what must not be
        return f"{type(error).__name__}: {error}"
    if f"{path}: " in caplog.text:
        return "said"
    if overrides:
        return "same"
    whole = project.folder / "whole"
    weights, expected = final_weights(project.run), final_weights(whole)
    is_same = all(torch.equal(weights[name], expected[name]) for name in expected)
    # what is logged at which step is no bit of what is trained
    if not path.startswith("train.log_"):
        is_same = is_same and losses(project.run) == losses(whole)
    return "same" if is_same else "silently another run"


@dataclass(frozen=True, kw_only=True)
class Planted(AdamW):
    """Says of a setting that no bit depends on it, which is not so."""

    weight_decay: Annotated[float, FREE] = 0.0


def test_the_walk_finds_a_setting_that_is_said_to_be_of_no_influence(stopped, monkeypatch, caplog):
    monkeypatch.setitem(OPTIMIZERS.own, "planted", Planted)
    optim = {"planted": {"learning_rate": 1e-3}}
    monkeypatch.setitem(BASES, "planted", {"optim": optim, "method": "full"})
    project = stopped("planted")
    changed = read(load(project.recipe), {"optim.planted.weight_decay": 0.5})
    assert outcome(changed, project, caplog, "optim") == "silently another run"


def own(name):
    """The settings of a base that no other base walks."""
    return lambda path: name == "sft" or path.startswith(f"{name}.")


@pytest.mark.proof
@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize("place", ["own", "new"])
def test_every_setting_is_refused_said_or_of_no_influence(name, place, stopped, caplog):
    project, found = stopped(name), {}
    recipe = load(project.recipe)
    for path, setting, value in filter(lambda leaf: own(name)(leaf[0]), leaves(recipe)):
        changed = other_recipe(recipe, path, setting, value)
        if changed is None or path in OUTSIDE:
            continue
        shutil.rmtree(project.run)
        shutil.copytree(project.folder / "stopped", project.run)
        more = {}
        if place == "new":
            shutil.rmtree(project.folder / "new", ignore_errors=True)
            more = {"checkpoint.resume": str(project.run / "checkpoint-2")}
            more["train.output_dir"] = str(project.folder / "new")
        found[path] = outcome(changed, project, caplog, path, **more)
    assert set(found.values()) <= {"refused", "said", "same"}, {
        path: what for path, what in found.items() if what not in ("refused", "said", "same")
    }
    logging.getLogger(__name__).warning("%s: %d settings walked", name, len(found))
    silent = {path for path, what in found.items() if what == "same"}
    free = schema.changeable(recipe)
    assert all(any(f"{path}.".startswith(f"{p}.") for p in free) for path in silent), silent
