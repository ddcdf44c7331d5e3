"""The speed of the hardware, and the memory of a process."""

from __future__ import annotations

import contextlib
import platform
import resource
import sys
import time
from pathlib import Path

import torch

_SIZES = {"cpu": 1024, "cuda": 8192}  # of square matrices: large enough to keep all units busy
_SECONDS = 0.5
_FEWEST = 3  # products
_PROCESS = Path("/proc/self")


def gemm_flops(dtype: torch.dtype, device: torch.device) -> float:
    """The most operations per second that a product of two matrices reaches on this device. Values
    are random, as a GPU multiplies ones faster than it ever multiplies weights."""
    size, draws = _SIZES[device.type], torch.Generator(device).manual_seed(0)  # not the run's own
    a, b = (torch.randn(size, size, generator=draws, dtype=dtype, device=device) for _ in range(2))
    a @ b  # loads the kernel
    best, began, count = float("inf"), time.perf_counter(), 0
    while count < _FEWEST or time.perf_counter() - began < _SECONDS:
        best, count = min(best, _product(a, b)), count + 1
    return 2.0 * size**3 / best


def _product(a: torch.Tensor, b: torch.Tensor) -> float:
    """Seconds of one product."""
    is_gpu = a.device.type == "cuda"
    if is_gpu:
        torch.cuda.synchronize(a.device)
    start = time.perf_counter()
    a @ b
    if is_gpu:
        torch.cuda.synchronize(a.device)
    return time.perf_counter() - start


def forget_peak(device: torch.device) -> None:
    """Start to measure the peak memory, where the system supports it (Linux, GPUs)."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):
        (_PROCESS / "clear_refs").write_text("5")


def peak_memory(device: torch.device) -> int:
    """Peak memory of this process in bytes: on the GPU, that of its allocator; otherwise RSS."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    with contextlib.suppress(OSError):
        for line in (_PROCESS / "status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def name_of(device: torch.device) -> str:
    """The name of the device, for people."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU ({platform.machine()}, {torch.get_num_threads()} threads)"
