"""Public names of a package, each imported from its module on first use.

So a package lists its names in one place, and importing one module of it does not import all the
others, and torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence


def lazy_getattr(package: str, homes: Mapping[str, Sequence[str]]) -> Callable[[str], object]:
    """The ``__getattr__`` of ``package``: ``homes`` are its modules and the names each exports."""
    modules = {name: home for home, names in homes.items() for name in names}

    def find(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(modules[name], package), name)

    return find
