"""``export --to compressed-tensors``; what quantizes is imported when it is used."""

from __future__ import annotations

import click

from ...cli.exporter import DTYPE, MAX_SHARD_SIZE, Exporter

COMPRESSED_TENSORS = Exporter(
    summary="a folder with quantized weights for vLLM and SGLang",
    writer=f"{__package__}.export:write_quantized",
    options=(
        click.Option(
            ["--group-size"],
            type=click.Choice(["32", "64", "128"]),
            help="Inputs that share a scale, with --quantize w4a16; unset, 128.",
        ),
        click.Option(
            ["--algorithm"],
            type=click.Choice(["rtn", "gptq"]),
            default="rtn",
            show_default=True,
            help="How weights are rounded: to nearest; w4a16 and w8a8 also by GPTQ, on 128 rows of "
            "the run's training data, which takes longer and usually loses less.",
        ),
        DTYPE,
        MAX_SHARD_SIZE,
    ),
    formats=("fp8", "fp8-block", "w8a8", "w4a16"),
    servers=("vllm serve {}", "python -m sglang.launch_server --model-path {}"),
    package="compressed_tensors",
)
