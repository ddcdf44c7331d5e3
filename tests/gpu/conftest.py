"""One device for all tests here: a GPU where there is one, otherwise the CPU."""

import pytest

from surefoot.model import loading
from surefoot.model.numerics import use_deterministic_kernels


@pytest.fixture(scope="session")
def device():
    return loading.device()


@pytest.fixture
def deterministic():
    """``train.deterministic`` for the length of a test."""
    use_deterministic_kernels(True)


@pytest.fixture(autouse=True)
def _not_for_the_next_test():
    yield
    use_deterministic_kernels(False)
