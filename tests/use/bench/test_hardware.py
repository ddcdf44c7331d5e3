"""What the hardware can do is measured, not looked up."""

import torch

from surefoot.use import bench
from surefoot.use.bench import forget_peak, gemm_flops, name_of, peak_memory

CPU = torch.device("cpu")


def test_a_product_of_matrices_has_a_speed(monkeypatch):
    monkeypatch.setitem(bench._SIZES, "cpu", 64)  # a large one of bfloat16 takes seconds
    for dtype in (torch.float32, torch.bfloat16):
        assert gemm_flops(dtype, CPU) > 1e6


def test_the_peak_holds_what_was_there_and_is_gone():
    size = 64 << 20
    forget_peak(CPU)
    before = peak_memory(CPU)
    torch.ones(size // 4)
    assert peak_memory(CPU) >= before
    assert peak_memory(CPU) >= size


def test_a_device_has_a_name():
    assert "CPU" in name_of(CPU)
