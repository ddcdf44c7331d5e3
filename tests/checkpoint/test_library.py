"""The package as a library for other loops: small, cheap to import, and free of transformers."""

import subprocess
import sys

import pytest

from surefoot import checkpoint

BLOCKED = ["transformers", "peft", "datasets", "accelerate", "pydantic", "rich", "click"]
NAMES = ["AsyncSaver", "CheckpointError", "Found", "Mesh", "NamedOptimizer", "RandomState"]
NAMES += ["Renamed", "Report", "RetentionPolicy", "SaveListener", "Stateful", "TensorSource"]
NAMES += ["copy", "find_latest", "load", "open_folder", "recover_latest"]
NAMES += ["reshard", "save", "verify"]


def python(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_public_names_are_these():
    assert checkpoint.__all__ == NAMES
    for name in NAMES:
        assert getattr(checkpoint, name).__name__ == name


def test_other_names_do_not_exist():
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        _ = checkpoint.no_such_name


def test_it_works_where_transformers_and_its_like_are_not_installed(tmp_path):
    code = f"""
import sys
blocked = {BLOCKED}
class Block:
    def find_spec(self, name, *_):
        if name.split(".")[0] in blocked:
            raise ImportError(name)
sys.meta_path.insert(0, Block())
from surefoot.checkpoint import *
import torch
model = torch.nn.Linear(3, 2)
with AsyncSaver({str(tmp_path)!r}, keep=1) as saver:
    saver.save(1, {{"model": model, "random": RandomState()}})
path = recover_latest({str(tmp_path)!r})
load(path, {{"model": model}})
print(path.name, verify(path).ok, dict(open_folder(path).shapes()))
assert reshard(path, {str(tmp_path / "cut")!r}, layout="distributed", mesh=Mesh(tp=2)).num_bytes
print([name for name in blocked if name in sys.modules])
"""
    shapes = {"bias": (2,), "weight": (2, 3)}
    assert python(code) == f"checkpoint-1 True {shapes}\n[]\n"


def test_importing_it_imports_no_torch():
    code = "import sys, surefoot.checkpoint; print({'torch', 'numpy'} & set(sys.modules))"
    assert python(code) == "set()\n"


def test_the_process_that_writes_imports_no_torch():
    code = "import sys, surefoot.checkpoint.saving._writer; "
    code += "print({'torch', 'numpy'} & set(sys.modules))"
    assert python(code) == "set()\n"
