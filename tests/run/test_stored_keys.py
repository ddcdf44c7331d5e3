"""What is stored is found by all that it was made from: every setting of a recipe and every file of
a base is changed, and where the stored value changes, its key must."""

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from project import Project
from surefoot import schema
from surefoot.data import training_data
from surefoot.data.example import items_of
from surefoot.data.rows.catalog import Catalog
from surefoot.data.rows.rows import read_rows
from surefoot.data.text.codec import Codec
from surefoot.errors import SurefootError
from surefoot.model import base_identity
from surefoot.model.base_identity import FileIdentity
from surefoot.model.numerics import use_deterministic_kernels
from surefoot.parallel.world import ALONE
from surefoot.recipe.recipe import Recipe, dump, load
from surefoot.recipe.recipe_data import encoding_of
from surefoot.run import contexts
from surefoot.run.models import open_models
from surefoot.run.parts import RunParts, build_codec
from surefoot.training import precompute
from surefoot.training.stage import POLICY, auxiliary_models

ROUNDING = 1e-4  # nats: on another mesh, or packed, the same value is computed to within this
WORDS = (True, False, 2, 1, 3, 0.5, "x", ["x"], ["<new>"], 48, 1024)


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stored")
    data = {"datasets": ["pairs"], "cache_dir": str(folder / "cache"), "cutoff_len": 40}
    model = {"max_positions": 1024}  # or nothing would depend on the kind of scaling
    return Project(folder, stage={"dpo": {}}, method={"lora": {"rank": 4}}, data=data, model=model)


def leaves(value, path=()):
    """The settings of a recipe with plain values, by their dotted paths."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from leaves(inner, (*path, name))
    else:
        yield ".".join(path), value


def candidates(made, path, value):
    """Other values: of the same type, those that the error names, and of any type."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int | float):
        yield from (value * 2, value + 1, value / 2)
    try:
        load(made.recipe, {path: "no such value"})
    except SurefootError as error:
        for options in re.findall(r"expected (?:one of )?([\w\-, .]+)", str(error)):
            yield from options.replace(" or ", ", ").split(", ")
    yield from WORDS


def saved(made, recipe, path, value):
    """``recipe`` with one setting changed, as a run has saved it: also one that does nothing."""
    data = json.loads(json.dumps(schema.write(recipe), default=str))
    *sections, name = path.split(".")
    inner = data
    for section in sections:
        inner = inner[section]
    inner[name] = value
    file = made.folder / "changed.json"
    file.write_text(json.dumps(data))
    return load(file, is_saved=True)


def others(made, section, without=()):
    """The recipes of a project with one setting changed, by its path, as far as one is found."""
    first = load(made.recipe)
    for path, value in leaves(schema.write(first)):
        if not path.startswith(section) or path in without:
            continue
        for candidate in candidates(made, path, value):
            try:
                other = saved(made, first, path, candidate)
            except (SurefootError, ValueError):
                continue
            if dump(other) != dump(first):
                yield path, other
                break


def tokens(recipe: Recipe, examples=None):
    """The key of each dataset; and a function that gives its tokens."""
    codec = build_codec(recipe, Path(recipe.model.path))
    encoding, entries = encoding_of(recipe, codec), Catalog(recipe.data).entries
    keys = {str(e.name): encoding.key(e, e.source.content_hash()) for e in entries}

    def value():
        found = {}
        for entry in entries:
            drawn = encoding.drawn.get(entry.name)
            rows = read_rows(entry, encoding.section, None if drawn is None else drawn.distinct)
            outcomes = encoding.encode(list(rows))
            found[str(entry.name)] = [[dict(i) for i in items_of(each)] for each in outcomes]
        return found

    return keys, value


def reference(recipe: Recipe, examples):
    """The key of reference log-probabilities; and a function that computes those of examples."""
    base = Path(recipe.model.path)
    codec = build_codec(recipe, base)
    parts = RunParts.around(recipe, codec, base)
    roles = {r: parts.models.auxiliary(r) for r in auxiliary_models(recipe.stage, "ahead")}
    cache = recipe.data.cache_dir / "none"
    key = contexts._ingredients(parts, roles, cache).identity if roles else None
    shutil.rmtree(cache, ignore_errors=True)

    def value():
        use_deterministic_kernels(True)
        networks = open_models(parts.models, list(roles), codec, ALONE)
        networks[POLICY] = networks["reference"]
        context = contexts.context_of(parts, networks, ALONE)
        added = recipe.stage.precompute(context, examples)
        return np.concatenate([np.asarray(item["reference"]) for item in added])

    return {"reference": key}, value


def same(one, other):
    if isinstance(one, np.ndarray):
        return one.shape == other.shape and np.allclose(one, other, atol=ROUNDING)
    return one == other


STORED = {"tokens": tokens, "reference": reference}


def examples_of(made):
    """The same for all, whatever they would be encoded to."""
    (rows,) = tokens(load(made.recipe))[1]().values()
    return [item for items in rows[:6] for item in items]


def faults(made, stored, changed):
    """What changes the value that is stored and not its key; and how many were changed."""
    examples, count, found = examples_of(made), 0, []
    key, value = STORED[stored](load(made.recipe), examples)
    first = value()
    for name, recipe in changed:
        count += 1
        try:
            other_key, other_value = STORED[stored](recipe, examples)
            shared = key.items() & other_key.items()
            if not shared:
                continue
            other = other_value()
        except (SurefootError, NotImplementedError):
            continue  # refused: nothing is stored
        if stored == "tokens":
            is_same = all(same(first[n], other[n]) for n, _ in shared)
        else:
            is_same = same(first, other)
        if not is_same:
            found.append(name)
    return found, count


def bases(made, folder, *, every=True):
    """The recipes of a project over copies of its base with one change in one file."""
    source = Path(load(made.recipe).model.path)
    for path in sorted(source.iterdir()):
        data = path.read_bytes()
        signs = bytes(byte ^ (0x80 if at % 4 == 3 else 0) for at, byte in enumerate(data[-4096:]))
        is_text = path.suffix != ".safetensors"
        changes = {
            "": data[:-3] + bytes([data[-3] ^ 64]) + data[-2:] if is_text else data[:-4096] + signs
        }
        if path.suffix == ".json":
            content = json.loads(data)
            changes = {
                key: json.dumps({**content, key: other}).encode()
                for key, value in content.items()
                for other in others_of(value)
            }
        for number, (key, changed) in enumerate(changes.items()):
            if not every and number % 9:
                continue
            copy = folder / f"{path.name}-{number}"
            shutil.copytree(source, copy)
            (copy / path.name).write_bytes(changed)
            yield f"{path.name} {key}", load(made.recipe, {"model.path": str(copy)})
            shutil.rmtree(copy)


def others_of(value):
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value + 1]
    return [None] if value is not None else []


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("section", ["model.", pytest.param("", marks=pytest.mark.proof)])
def test_a_setting_that_changes_what_is_stored_changes_its_key(stored, section, project):
    without = ("model.compile",) if section else ()  # which takes 40 s, and changes rounding
    found, count = faults(project, stored, others(project, section, without))
    print(f"{stored}: {count} settings")
    assert found == []
    assert count > (120 if not section else 15)


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.proof)])
def test_a_file_of_a_base_that_changes_what_is_stored_changes_its_key(
    stored, every, project, tmp_path
):
    found, count = faults(project, stored, bases(project, tmp_path, every=every))
    print(f"{stored}: {count} changes of files")
    assert found == []
    assert count > (30 if every else 5)


def test_the_walks_find_what_a_key_lacks(project, tmp_path, monkeypatch):
    with monkeypatch.context() as changed:
        lacking = {"max_positions", "rope_scaling"}
        changed.setattr(precompute, "_ELSEWHERE", precompute._ELSEWHERE | lacking)
        found, _ = faults(project, "reference", others(project, "model.", ("model.compile",)))
        assert "model.rope_scaling" in found
    with monkeypatch.context() as changed:
        changed.setattr(Codec, "fingerprint", "the same")
        changed.setattr(training_data, "SETTINGS", ("cutoff_len",))
        found, _ = faults(project, "tokens", others(project, "data.default"))
        assert found == ["data.default_system"]
    with monkeypatch.context() as changed:
        changed.setattr(base_identity, "_identity", lambda *_: FileIdentity("the same", 0, ""))
        found, _ = faults(project, "reference", bases(project, tmp_path, every=False))
        assert "model.safetensors " in found
