"""Comparison with float64: by norm, in roundings of the type that was computed in."""

import pytest
import torch

ROUNDINGS = {torch.float32: 100, torch.bfloat16: 4, torch.float16: 8}


def assert_close(found, exact, dtype, name=""):
    """The norm of the error is a few roundings of the norm of ``exact``."""
    error = float((found.double() - exact.double()).norm())
    bound = ROUNDINGS[dtype] * torch.finfo(dtype).eps * float(exact.double().norm())
    assert error <= bound, f"{name}: an error of {error:.3g}, at most {bound:.3g} expected"


def assert_all_close(found, exact, dtype, names):
    for one, other, name in zip(found, exact, names, strict=True):
        assert_close(one, other, dtype, name)


def needs_cuda(device, why):
    if device.type != "cuda":
        pytest.skip(f"needs a GPU: {why}")
