"""What is put right in the imports of torch and transformers: they answer as before, sooner."""

import functools
import subprocess
import sys
from types import ModuleType

from hypothesis import given
from hypothesis import strategies as st
from transformers.utils import import_utils

from surefoot.cli import mending

IMPORT = "import torch._library.utils as sources, transformers.models"
MENDED = f"from surefoot.cli.mending import mending\nwith mending():\n    {IMPORT}"
TOLD = """
told = [sorted(vars(module)["_class_to_module"].items())
        for module in (transformers, transformers.models)]
needs = [sorted((name, sorted(map(str, missing))) for name, missing in module.items())
         for module in map(lambda m: vars(m)["_object_missing_backend"],
                           (transformers, transformers.models))]
assert len(told[0]) > 1000
print(told, needs)
def registered():
    return sources.get_source(2)
print(registered())
print(sources.get_source.__module__)
print(type(transformers.utils.import_utils.fetch__all__).__name__)
"""
LINES = ["__all__", " __all__", "__all__ = ['A', 'B']", "__all__ = [", "]", '"C",', "x = 1", ""]
BREAKS = ["\n", "\r\n", "\x0c", "\u2028"]


def printed(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_transformers_knows_the_same_classes_and_torch_the_same_places():
    alone, mended = printed("\n\n" + IMPORT + TOLD), printed(MENDED + TOLD)
    assert mended[:2] == alone[:2]
    assert alone[2:] == ["torch._library.utils", "function"]
    assert mended[2:] == ["surefoot.cli.mending", "partial"]


@given(st.lists(st.tuples(st.sampled_from(LINES), st.sampled_from(BREAKS))))
def test_the_last_list_is_found_wherever_it_is(lines):
    content = "".join(line + end for line, end in lines)
    found = []
    for fetch in (
        import_utils.fetch__all__,
        functools.partial(mending._last_list, import_utils.fetch__all__),
    ):
        try:
            found.append(fetch(content))
        except IndexError as error:  # a line that is not an assignment
            found.append(str(error))
    assert found[0] == found[1]


def test_functions_that_are_not_as_expected_stay_as_they_are():
    def get_source(stacklevel, *, is_short=False):
        return str(stacklevel) if is_short else "?"

    def create_import_structure_from_path(path):
        return path

    for mend in mending.MENDS.values():
        for names in ({}, {"get_source": get_source}, {"get_source": len}):
            module = ModuleType("odd")
            own = names | {"create_import_structure_from_path": create_import_structure_from_path}
            vars(module).update(own)
            mend(module)
            assert vars(module).items() >= own.items()


def test_nothing_of_it_stays_in_the_way_of_other_imports():
    before = list(sys.meta_path)
    with mending.mending():
        assert len(sys.meta_path) == len(before) + 1
    assert sys.meta_path == before
