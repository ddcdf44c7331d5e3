"""Recipes, dataset_info.json and adapter configurations with values changed at random: each is
read, or an error for people comes out of it, never anything else."""

import contextlib
import copy
import json
import shutil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from folders import save_adapter, save_recipe
from surefoot.data.rows.catalog import problems_of
from surefoot.data.section import DataSection
from surefoot.errors import SurefootError
from surefoot.methods import LoRA
from surefoot.model.section import ModelSection
from surefoot.network.draft import MetaTensors, NetworkOptions
from surefoot.network.open import open_network
from surefoot.parallel.world import ALONE
from surefoot.recipe.recipe import dump, load, read
from surefoot.run.resolving import with_adapter_settings
from surefoot.use._model_location import locate

WORDS = ["", "auto", "full", "lora", "all", "q_proj", "/", "..", "~", "é", "\0", "s3://b/r", "1e3"]
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.integers(-2, 2)
    | st.floats()
    | st.sampled_from(WORDS)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(WORDS) | st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=4,
)
FEW = settings(
    max_examples=30, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
MANY = settings(FEW, max_examples=3000, derandomize=False)


def places(tree, path=()):
    """Every place in a JSON tree."""
    yield path
    children = tree.items() if isinstance(tree, dict) else ()
    children = enumerate(tree) if isinstance(tree, list) else children
    for key, value in children:
        yield from places(value, (*path, key))


def changed(tree, path, value):
    """``tree`` with another value at ``path``; without it if the value is ``...``."""
    if not path:
        return value
    made = copy.deepcopy(tree)
    inner = made
    for key in path[:-1]:
        inner = inner[key]
    if value is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return made


def mutations(tree):
    """``tree`` with one or two values changed, or a key renamed."""
    one = st.tuples(st.sampled_from([p for p in places(tree) if p]), VALUES | st.just(...))
    once = one.map(lambda change: changed(tree, *change))
    return once | st.tuples(once, st.text(max_size=6), VALUES).map(
        lambda three: {**three[0], three[1]: three[2]}
    )


RECIPE = {
    "model": {"path": "model", "adapter": None, "dtype": "auto", "new_special_tokens": ["<a>"]},
    "data": {"datasets": ["sums"], "cutoff_len": 64, "val_size": 6, "packing": True},
    "method": {"lora": {"rank": 4, "targets": ["all"], "rank_pattern": {"q_proj": 2}}},
    "stage": {"dpo": {"beta": 0.1}},
    "train": {"output_dir": "run", "max_steps": 4, "eval_steps": 2, "on_nan": "skip"},
    "optim": {"adamw": {"learning_rate": 0.001, "learning_rates": {"lora_B": 2.0}}},
    "checkpoint": {"save_steps": 2, "keep": 3},
    "parallel": {"tp": 1, "pp": 1},
    "generate": {"max_new_tokens": 4},
}
INFO = {
    "sums": {
        "file_name": "sums.json",
        "formatting": "alpaca",
        "columns": {"prompt": "instruction", "response": "output"},
    },
    "chats": {
        "file_name": "chats.json",
        "formatting": "sharegpt",
        "columns": {"messages": "conversations"},
        "tags": {"role_tag": "from", "content_tag": "value"},
    },
}
ROWS = {
    "sums": [{"instruction": "1+1?", "output": "2"}] * 3,
    "chats": [{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mutations")
    save_recipe(folder)
    save_adapter(folder / "model", folder / "adapter")
    for name, rows in ROWS.items():
        (folder / "data" / f"{name}.json").write_text(json.dumps(rows))
    return folder


def read_recipe_of(folder, tree):
    path = folder / "recipe.json"
    path.write_text(json.dumps(tree))
    with contextlib.suppress(SurefootError):
        found = load(path)
        assert read(found) == found
        dump(found)


def read_datasets_of(folder, tree, name):
    (folder / "data" / "dataset_info.json").write_text(json.dumps(tree))
    section = DataSection(datasets=(name,), dataset_dir=folder / "data", max_broken_rows=9)
    with contextlib.suppress(SurefootError):
        problems_of(section)


def read_adapter_of(folder, tree):
    target = folder / "changed"
    shutil.copytree(folder / "adapter", target, dirs_exist_ok=True)
    (target / "adapter_config.json").write_text(json.dumps(tree))
    section = ModelSection(path=str(folder / "model"), adapter=target)
    with contextlib.suppress(SurefootError):
        locate(target)
        data = {**RECIPE, "model": {"path": str(folder / "model"), "adapter": str(target)}}
        method = with_adapter_settings(read({**data, "method": {"lora": {}}})).method
        assert isinstance(method, LoRA)
        options = NetworkOptions(method=method)
        open_network(folder / "model", section, None, ALONE, options, MetaTensors())


def adapter_config(folder):
    return json.loads((folder / "adapter" / "adapter_config.json").read_text())


@given(tree=mutations(RECIPE))
@FEW
def test_a_recipe_is_read_or_refused(folder, tree):
    read_recipe_of(folder, tree)


@given(tree=mutations(INFO), name=st.sampled_from(list(INFO)))
@FEW
def test_an_entry_of_a_dataset_is_read_or_refused(folder, tree, name):
    read_datasets_of(folder, tree, name)


@pytest.mark.filterwarnings("ignore")  # of PEFT, which the command line leaves out
@given(data=st.data())
@settings(FEW, max_examples=15)
def test_the_configuration_of_an_adapter_is_read_or_refused(folder, data):
    read_adapter_of(folder, data.draw(mutations(adapter_config(folder))))


@pytest.mark.proof
@given(tree=mutations(RECIPE))
@MANY
def test_thousands_of_recipes(folder, tree):
    read_recipe_of(folder, tree)


@pytest.mark.proof
@given(tree=mutations(INFO), name=st.sampled_from(list(INFO)))
@MANY
def test_thousands_of_entries(folder, tree, name):
    read_datasets_of(folder, tree, name)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.proof
@given(data=st.data())
@settings(MANY, max_examples=1000)
def test_a_thousand_configurations_of_adapters(folder, data):
    read_adapter_of(folder, data.draw(mutations(adapter_config(folder))))
