"""Slow spots in the imports of torch and transformers, put right as soon as they are loaded.

Functions of theirs are replaced by ones that answer the same; where a function is not as expected,
in another version, it stays as it is. Figures are seconds of processor time, of three until a model
trains.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType

Mend = Callable[[ModuleType], None]


@contextmanager
def mending() -> Iterator[None]:
    """Put right what is imported inside."""
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def list_models_once(module: ModuleType) -> None:
    """Spare a second look at the models of transformers, and most of the first: 0.35 s.

    To learn the names of their classes, it reads their 36 MB of sources line by line, looking for
    ``__all__``, and a little later all of them once more: it remembers what it has found, but of
    128 folders, and has 550.
    """
    remembered = getattr(module, "create_import_structure_from_path", None)
    build = getattr(remembered, "__wrapped__", None)
    fetch = getattr(module, "fetch__all__", None)
    if hasattr(remembered, "cache_parameters") and callable(build) and callable(fetch):
        _replace(module, "create_import_structure_from_path", functools.cache(build))
        _replace(module, "fetch__all__", functools.partial(_last_list, fetch))


def _last_list(fetch: Callable[[str], list[str]], content: str) -> list[str]:
    """What ``fetch`` finds in a file. It takes the last line that begins with ``__all__``, so that
    it need not see those before it."""
    return fetch(content[max(0, content.rfind("\n__all__") + 1) :])


def name_sources_only(module: ModuleType) -> None:
    """Let torch note where an operator is registered without reading that file: 0.08 s.

    It asks for the line itself as well, which it has no use for, and for which Python looks through
    all modules.
    """
    known = getattr(getattr(module, "get_source", None), "__code__", None)
    if getattr(known, "co_names", None) == _source.__code__.co_names:  # it asks the same questions
        _replace(module, "get_source", _source)


def _source(stacklevel: int) -> str:
    frame = inspect.getframeinfo(sys._getframe(stacklevel), context=0)
    return f"{frame.filename}:{frame.lineno}"


def _replace(module: ModuleType, name: str, function: Callable[..., object]) -> None:
    vars(module)[name] = function


MENDS: Mapping[str, Mend] = {
    "torch._library.utils": name_sources_only,
    "transformers.utils.import_utils": list_models_once,
}


class _Finder(MetaPathFinder):
    """Finds those modules, as ever, and has each put right when it has been loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path) if fullname in MENDS else None
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        MENDS[module.__name__](module)
