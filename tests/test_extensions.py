"""The seam of plugins: what they name exists, and nothing of the core imports them."""

import subprocess
import sys

import pytest

from each import each
from surefoot import extensions
from surefoot.errors import SurefootError
from surefoot.extensions import BUILT_IN, Extended, Plugin, imported, plugins

LISTS = [name for name in Plugin.__dataclass_fields__ if name != "name"]


@each(BUILT_IN, str)
def test_what_a_plugin_names_exists(place):
    plugin = imported(place)
    for kind in LISTS:
        for entry in getattr(plugin, kind).values():
            imported(entry if isinstance(entry, str) else entry[1])


def test_a_plugin_module_is_light():
    code = "import sys; from surefoot.extensions import plugins; plugins(); print(*sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"torch", "numpy", "transformers", "pydantic"}
    assert not heavy & set(told.stdout.split())


def test_a_plugin_that_cannot_be_imported_is_named(monkeypatch):
    monkeypatch.setattr(extensions, "BUILT_IN", ("nowhere.plugin:PLUGIN",))
    plugins.cache_clear()
    with pytest.raises(SurefootError, match="reinstall or remove the package nowhere"):
        list(Extended("layouts", {}))
    plugins.cache_clear()
