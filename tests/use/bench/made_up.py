"""Figures of steps that nobody ran."""

from surefoot.use.bench.measurement import BenchResult


def figures(speed, *, compiling=0.0, run_steps=1000):
    return BenchResult(
        device="CPU",
        precision="fp32",
        run_steps=run_steps,
        steps=2,
        tokens=200,
        trained_tokens=100,
        positions=250,
        flops=1e9,
        gemm_flops=1e9,
        peak_memory=1,
        compiling_seconds=compiling,
        phases={"data": 50 / speed, "forward": 150 / speed},
    )
