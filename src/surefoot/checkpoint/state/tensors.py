"""Flatten a nested state into named tensors and a JSON structure that refers to them, and back.

The structure is plain JSON where JSON can represent it. Other values are an object with one key
that starts with ``$``: ``{"$tensor": name}``, ``{"$tuple": [...]}``,
``{"$dict": [[key, value], ...]}`` for keys that are not text, ``{"$float": "nan"}``,
``{"$int": "0x..."}`` beyond 53 bits. Nothing is lost or guessed: values that cannot be restored
exactly are rejected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...errors import CheckpointError
from ..disk.strict_json import MAX_DEPTH

Skeleton = Any  # what json.dumps takes
_EXACT = 1 << 53  # integers up to here survive in every JSON reader
_LEVELS = MAX_DEPTH // 4  # a level of the state costs up to three of the JSON


def split(tree: object, where: str) -> tuple[dict[str, torch.Tensor], Skeleton]:
    """The tensors in ``tree`` by their path ("a.0.b"), and the structure; errors name ``where``."""
    tensors: dict[str, torch.Tensor] = {}

    def walk(value: Any, path: tuple[str, ...]) -> Skeleton:
        if isinstance(value, torch.Tensor):
            name = ".".join(path)
            if name in tensors:  # {"a": {"b": t}, "a.b": t}
                raise CheckpointError(f"{where}: two tensors would both be called {name!r}")
            tensors[name] = value
            return {"$tensor": name}
        if len(path) > _LEVELS:
            raise CheckpointError(
                f"{where}: nested deeper than {_LEVELS} levels: {'.'.join(path)[:200]}"
            )
        if isinstance(value, dict):
            return _dict(value, path, walk, where)
        if type(value) in (list, tuple):
            items = [walk(item, (*path, str(i))) for i, item in enumerate(value)]
            return items if type(value) is list else {"$tuple": items}
        return _leaf(value, f"{where}.{'.'.join(path)}")

    return tensors, walk(tree, ())


def join(skeleton: Skeleton, tensors: Mapping[str, torch.Tensor], where: str) -> Any:
    """The inverse of ``split``."""
    if isinstance(skeleton, list):
        return [join(item, tensors, where) for item in skeleton]
    if not isinstance(skeleton, dict):
        return skeleton
    tag = next(iter(skeleton), "")
    if not tag.startswith("$"):
        return {key: join(value, tensors, where) for key, value in skeleton.items()}
    if len(skeleton) != 1 or tag not in _READERS:
        raise CheckpointError(f"{where}: {str(skeleton)[:80]} is not a state of this format")
    try:
        return _READERS[tag](skeleton[tag], tensors, where)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{where}: {str(skeleton)[:80]} cannot be read: {error}") from error


def pointers(skeleton: Skeleton) -> list[str]:
    """The names of all tensors to which ``skeleton`` refers, in order."""
    if isinstance(skeleton, list):
        return [name for item in skeleton for name in pointers(item)]
    if not isinstance(skeleton, dict):
        return []
    if skeleton.keys() == {"$tensor"}:
        return [str(skeleton["$tensor"])]
    return [name for item in skeleton.values() for name in pointers(item)]


def _dict(
    value: Mapping[Any, Any], path: tuple[str, ...], walk: Callable[..., Skeleton], where: str
) -> Skeleton:
    if all(type(key) is str and not key.startswith("$") for key in value):
        return {key: walk(item, (*path, key)) for key, item in value.items()}
    where = ".".join((where, *path))
    return {"$dict": [[_key(k, where), walk(v, (*path, str(k)))] for k, v in value.items()]}


def _key(key: object, where: str) -> Skeleton:
    if type(key) is tuple:
        return {"$tuple": [_key(part, where) for part in key]}
    return _leaf(key, f"{where}: the key {str(key)[:80]!r}")


def _leaf(value: object, where: str) -> Skeleton:
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return value if -_EXACT <= value <= _EXACT else {"$int": hex(value)}  # type: ignore[operator,arg-type]
    if kind is float:
        return value if math.isfinite(value) else {"$float": str(value)}  # type: ignore[arg-type]
    advice = "call .item() on it first" if hasattr(value, "item") else "store plain data instead"
    raise CheckpointError(
        f"{where}: cannot store a {kind.__module__}.{kind.__qualname__}; {advice}"
    )


_READERS: dict[str, Callable[[Any, Mapping[str, torch.Tensor], str], Any]] = {
    "$tensor": lambda name, tensors, _: tensors[name],
    "$tuple": lambda items, tensors, where: tuple(join(item, tensors, where) for item in items),
    "$dict": lambda pairs, tensors, where: {
        join(key, tensors, where): join(value, tensors, where) for key, value in pairs
    },
    "$int": lambda text, *_: int(text, 16),
    "$float": lambda text, *_: {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[text],
}
