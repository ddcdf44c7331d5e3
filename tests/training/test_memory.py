"""What is freed stays with the process."""

import platform
import resource

import pytest
import torch

from surefoot.training.memory import keep_freed_memory


def faults():
    """Pages that this process has been given so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is of glibc alone")
def test_a_large_block_is_had_again_without_new_pages():
    keep_freed_memory()
    make = lambda: torch.ones(64 * 2**20, dtype=torch.uint8)  # noqa: E731
    make()
    before = faults()
    for _ in range(10):
        make()
    assert faults() - before < 10 * 64 * 2**20 / 4096 / 4
