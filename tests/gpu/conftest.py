"""One device for all tests here: a GPU where there is one, otherwise the CPU."""

import os

import pytest
import torch

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before the first product on a GPU

from surefoot.model.pretrained import loading
from surefoot.model.seeding import use_deterministic_kernels

# On a GPU, torch and Triton warn of much that is of no interest here; not so of sums whose order
# is left to chance.
CALM = pytest.mark.filterwarnings("default::UserWarning", "error:.*determinis.*:UserWarning")


def pytest_itemcollected(item):
    if torch.cuda.is_available():
        item.add_marker(CALM)


@pytest.fixture(scope="session")
def device():
    return loading.device()


@pytest.fixture
def deterministic():
    """``train.deterministic`` for the length of a test."""
    use_deterministic_kernels(True)
    yield
    use_deterministic_kernels(False)
