"""Real files of MindSpore, and the truth about them: skipped where ../shared is not there."""

import shutil

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

SOURCES = ("single", "dp2mp2", "mp4", "pp2mp2", "dp4_opt", "dp2mp2_opt", "w8_pp2dp2mp2_opt")
SOURCES += ("dp2mp2_rr",)


@pytest.fixture(scope="session")
def real(request):
    folder = request.config.rootpath.parent / "shared" / "fixtures" / "mindspore"
    if not folder.is_dir():
        pytest.skip("needs ../shared/fixtures/mindspore, files that MindSpore wrote")
    return folder


@pytest.fixture(scope="session")
def truth(real):
    """The whole tensors by name."""
    with np.load(real / "global.npz") as found:
        return {name: torch.from_numpy(found[name]) for name in found.files}


@pytest.fixture
def copied(real, tmp_path):
    """Copy one of the real folders to where it can be changed."""

    def copy(name):
        target = tmp_path / name
        shutil.copytree(real / name, target)
        for path in [target, *target.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)
        return target

    return copy


def rank_file(folder, rank):
    (found,) = (folder / "checkpoint" / f"rank_{rank}").glob("*.safetensors")
    return found


def read(path):
    with safe_open(path, "pt") as file:
        names = list(file.keys())
        return {name: file.get_tensor(name) for name in names}, dict(file.metadata() or {})


def rewrite(path, change):
    """Let ``change`` edit the tensors of a file."""
    tensors, metadata = read(path)
    change(tensors)
    save_file(tensors, path, metadata)
