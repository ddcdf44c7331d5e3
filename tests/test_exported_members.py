"""The public names: what users may import, and that asking for them costs nothing."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import surefoot

ROOT = Path(__file__).parent.parent


def test_the_public_names_are_these():
    assert sorted(surefoot.__all__) == ["Outcome", "StageParts", "Trainer", "__version__", "train"]
    for name in surefoot.__all__:
        assert getattr(surefoot, name)


def test_the_version_is_that_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert surefoot.__version__ == project["version"]


def test_no_public_name_is_also_a_module():
    """Importing ``surefoot.train`` would put a module in the place of the function."""
    folder = Path(surefoot.__file__).parent
    modules = {path.stem for path in folder.iterdir()}
    assert not modules & set(surefoot.__all__)


def test_train_is_a_function_whatever_was_imported_before():
    import surefoot.training.section  # noqa: F401
    from surefoot import train
    from surefoot.run.training_run import train as the_same

    assert callable(train)
    assert train is the_same


def test_importing_the_package_imports_no_torch():
    code = (
        "import sys, surefoot; print([m for m in ('torch', 'click', 'typing') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "torch" not in done.stdout
    assert "click" not in done.stdout


def test_other_names_do_not_exist():
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        _ = surefoot.no_such_name


def test_the_package_is_typed():
    assert (Path(surefoot.__file__).parent / "py.typed").exists()
