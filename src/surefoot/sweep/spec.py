"""What a sweep is, in ``sweep.json``: a sweep that is started again must be the same one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from ..errors import RunError
from ..recipe.recipe import Recipe, changes, read
from . import files
from .objective import Objective
from .ranges import Choices, SweptKey
from .space import Space, plain
from .sweep import SearchSettings

_FORMAT = 1


def spec_of(space: Space, objective: Objective, search: SearchSettings) -> dict[str, object]:
    """Everything on which the trials of a sweep depend, but their number."""
    return {
        "format": _FORMAT,
        "keys": [_key(key) for key in space.keys],
        "objective": {
            "metric": objective.metric,
            "direction": objective.direction,
            "value": objective.value,
            "sentence": str(objective),
        },
        "sampler": search.sampler,
        "seed": search.seed,
        "pruner": search.pruner,
        "prune_after": search.prune_after,
        "recipe": plain(space.base),
    }


def settle(output: Path, space: Space, spec: Mapping[str, object]) -> None:
    """Write ``spec`` into the folder of a new sweep; of an old one, compare it. Raises
    ``RunError`` if they differ, or if the folder has trials of another sweep."""
    known = files.read_json(output / files.SPEC)
    if known is None and (output / files.SPEC).exists():
        raise RunError(f"{output / files.SPEC}: cannot be read; restore it, or choose another "
                       "--output")  # fmt: skip
    if known is None:
        _must_be_free(output)
        files.write_json(output / files.SPEC, spec)
        return
    if not (output / files.STUDY).exists() and any(output.glob("trial-*")):
        raise RunError(
            f"{output}: has trials, but no {files.STUDY}, which says what they are; restore it, or "
            "choose another --output"
        )
    if differing := [*_differing(known, spec, space)]:
        listed = "; ".join(differing[:4])
        raise RunError(
            f"{output}: contains a sweep with other settings ({listed}). To continue it, start it "
            "as it began, with more --trials if you like; for another sweep, choose another "
            "--output"
        )


def _must_be_free(output: Path) -> None:
    found = sorted(path.name for path in output.glob("*"))
    if taken := [name for name in found if name.startswith(("trial-", "checkpoint-"))]:
        raise RunError(
            f"{output}: contains {taken[0]}, but no {files.SPEC}, so no sweep wrote it; choose "
            "another --output"
        )
    for name in (files.STUDY, files.METRICS, files.BEST):
        if name in found:
            raise RunError(f"{output}: contains {name} already; choose another --output")


def _key(key: SweptKey) -> dict[str, object]:
    values = key.values
    found: dict[str, object] = {"key": key.key, "range": key.text}
    if isinstance(values, Choices):
        return found | {"choices": list(values.items)}
    return found | {
        "low": values.low,
        "high": values.high,
        "log": values.is_log,
        "integer": values.is_integer,
        "step": values.step,
    }


def _differing(
    known: Mapping[str, object], spec: Mapping[str, object], space: Space
) -> Iterator[str]:
    if known.get("format") != _FORMAT:
        yield f"its format is {known.get('format')}, expected {_FORMAT}"
        return
    before, after = _ranges(known), _ranges(spec)
    if before != after:
        yield f"ranges: {_listed(known)} -> {_listed(spec)}"
    for name in ("objective", "sampler", "seed", "pruner", "prune_after"):
        if _unworded(known.get(name)) != _unworded(spec[name]):
            was, now = (_sentence(one.get(name)) for one in (known, spec))
            yield f"{name}: {was} -> {now}"
    recipe = known.get("recipe")
    if isinstance(recipe, Mapping):
        yield from (str(change) for change in changes(_recipe(recipe), space.base))


def _recipe(data: Mapping[str, object]) -> Recipe:
    return read(data)


def _ranges(spec: Mapping[str, object]) -> object:
    """The ranges, however they were typed."""
    keys = spec.get("keys")
    if not isinstance(keys, list):
        return None
    return [{name: value for name, value in key.items() if name != "range"} for key in keys]


def _listed(spec: Mapping[str, object]) -> str:
    keys = spec.get("keys")
    found = keys if isinstance(keys, list) else []
    return " ".join(f"{key.get('key')}={key.get('range')}" for key in found)


def _unworded(value: object) -> object:
    """An objective without its sentence, which another version may word differently."""
    if not isinstance(value, Mapping):
        return value
    return {name: part for name, part in value.items() if name != "sentence"}


def _sentence(value: object) -> object:
    return value.get("sentence") if isinstance(value, Mapping) else value
