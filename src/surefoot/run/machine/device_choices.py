"""What depends on the device: one table of what is used, why, and the figures that justify it.

The page ``docs/reference/devices.md``, ``surefoot env`` and ``surefoot bench`` show this table. A
choice is a fixed rule, never a timing: a timing would let chance decide how a run rounds. Where no
figure supports a choice, the table says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from ...model.attention.kernels import BY_DOCUMENT, candidates
from ...model.fused_lora import count_fused
from ...model.precision import choose
from ...model.pretrained.loading import device, training_dtype
from ...model.section import ModelSection
from ...optim.bf16_weights import rule_of

if TYPE_CHECKING:  # `surefoot env` does not need them
    from ...network.network import Network
    from ...recipe.recipe import Recipe
    from ...training.trainer import Trainer

NOT_MEASURED = "not measured"
KINDS = {"cpu": "CPU", "cuda": "GPU (CUDA)"}


@dataclass(frozen=True)
class OnDevice:
    """One choice on one kind of device."""

    used: str  # in order of preference
    why: str
    figure: str = NOT_MEASURED


@dataclass(frozen=True)
class Choice:
    """One thing that depends on the device, or that could."""

    name: str
    setting: str  # that changes it; empty: none
    cpu: OnDevice
    cuda: OnDevice
    here: Callable[[torch.device], str] | None = None  # what the code uses; None: the text
    decides: str = ""  # what `make gpu` measures that would justify or change it; empty: nothing

    def on(self, kind: str) -> OnDevice:
        """What is used on ``kind``."""
        return self.cuda if kind == "cuda" else self.cpu


def _precision(_: torch.device) -> str:
    return choose("auto")


def _weights(_: torch.device) -> str:
    dtype = training_dtype(ModelSection(path=""))
    return "float32" if dtype == torch.float32 else "trained: float32; frozen: as stored"


def _attention(where: torch.device) -> str:
    return ", ".join([*candidates(where), f"{BY_DOCUMENT} (one call per document)"])


SAME = "the same on every device"
CHOICES: tuple[Choice, ...] = (
    Choice(
        "precision",
        "train.precision",
        OnDevice(
            "fp32",
            "a run has the same numbers on every CPU; one with bf16 units can set bf16",
            "one core of an AMD EPYC with AVX-512 BF16: products reach 24–81 GFLOP/s in fp32 and "
            "60–108 in bf16; without these instructions 25–91 and 10–35",
        ),
        OnDevice("bf16 if the GPU supports it, otherwise fp32", "tensor cores; no loss scaling"),
        _precision,
        "speed: MFU of `full 1.7B, chats`",
    ),
    Choice(
        "weights",
        "model.dtype",
        OnDevice("float32", "the only type that every CPU computes in at full speed"),
        OnDevice(
            "trained: float32; frozen: as stored",
            "float32 loses no small updates; frozen weights get none",
        ),
        _weights,
        "speed: `full 1.7B, chats`, Surefoot beside bfloat16 weights",
    ),
    Choice(
        "packed attention",
        "model.attention",
        OnDevice(
            "sdpa (one call per document)",
            "no mask is built",
            "1.7 times as fast as a block-diagonal mask",
        ),
        OnDevice(
            "varlen, flash (if flash-attn is installed), flex, sdpa (one call per document)",
            "the first that passes a self-check on the run's first row; every CUDA build of torch "
            "contains varlen",
        ),
        _attention,
        "profile: attention in `full 1.7B, rows of 8k`; correct: `tests/gpu/test_attention.py`",
    ),
    Choice(
        "padded attention",
        "model.attention",
        OnDevice("sdpa where the architecture has it, otherwise eager", "transformers' default"),
        OnDevice("sdpa where the architecture has it, otherwise eager", "transformers' default"),
    ),
    Choice(
        "output head and loss",
        "",
        OnDevice(
            "chunked cross entropy, 384 positions a chunk",
            "logits of a batch never exist; softmax in place",
            "1.02 (S) to 1.03 (M) times as fast with these chunks as with 256",
        ),
        OnDevice(
            "chunked cross entropy, 384 positions a chunk",
            f"{SAME}; torch's linear_cross_entropy (2.13) and Liger's are not used, as no figure "
            "compares them",
        ),
        decides="speed: `head 151,936 x 2,048` and the other heads, by time, memory and errors of "
        "each kernel, and of chunks of 384, 1,024 and 4,096 positions",
    ),
    Choice(
        "LoRA",
        "",
        OnDevice(
            "fused LoRA linear, unless compiled",
            "one pass over memory",
            "1.07 (S) and 1.14 (M) times as fast as PEFT's",
        ),
        OnDevice("fused LoRA linear, unless compiled", SAME),
        decides="speed: `lora 8B, chats`, beside the peers; profile: its kernels",
    ),
    Choice(
        "compilation",
        "model.compile",
        OnDevice("off", "the warm-up takes a minute; bench tries it"),
        OnDevice("off", "the warm-up takes a minute; bench tries it"),
        decides="speed: `full 1.7B, chats`, Surefoot beside compiled layers",
    ),
    Choice(
        "optimizer",
        "optim",
        OnDevice(
            "torch's fused kernel",
            "one pass over weights and moments",
            "4.6 % of a step with gradient clipping",
        ),
        OnDevice("torch's fused kernel", "skips a step that is not finite without waiting for it"),
        decides="profile: optimizer in `full 1.7B, chats`",
    ),
    Choice(
        "deterministic attention",
        "train.deterministic",
        OnDevice("nothing", "attention on CPUs adds in a fixed order"),
        OnDevice(
            "torch's strict mode during attention, forward and backward",
            "while torch only warns, gradients of queries are added in any order",
        ),
        decides="speed: `full 1.7B, chats`, Surefoot beside `train.deterministic: false`",
    ),
    Choice(
        "prefetch of windows",
        "",
        OnDevice("none", "a thread competes with the step", "costs 6 ms a window to save 1 ms"),
        OnDevice("a thread, into pinned memory", "the host is idle while the GPU computes"),
        decides="profile: host time between steps, and idle gaps",
    ),
    Choice(
        "snapshot for a save",
        "checkpoint.async_save",
        OnDevice("a copy in shared memory", "a writer process writes it while training continues"),
        OnDevice(
            "the same in pinned memory, on a stream of its own",
            "copies overlap with other work of the GPU",
        ),
        decides="save: stall, and how much slower steps are beside a save",
    ),
    Choice(
        "metrics of a step",
        "",
        OnDevice("read at once", "they are on the host"),
        OnDevice("read one step later", "nothing waits for the GPU"),
        decides="profile: calls that wait for the device",
    ),
    Choice(
        "freed memory",
        "",
        OnDevice(
            "kept by the C library (glibc)",
            "the next step needs the same",
            "pages requested in 8 steps: 3,400 instead of 49,000 (S), 20,000 instead of 360,000 "
            "(M)",
        ),
        OnDevice("kept by torch's allocator", "torch's default"),
    ),
    Choice(
        "collectives",
        "",
        OnDevice("gloo", "the only backend for CPUs"),
        OnDevice("NCCL; gloo for values on the host", "torch's default"),
    ),
    Choice(
        "float8 products",
        "model.float8",
        OnDevice("off; emulated if set", "no CPU multiplies float8"),
        OnDevice("off; torchao if set", "rounding to 8 bits changes how a run learns"),
        decides="speed: `full 1.7B, chats`, Surefoot beside float8 `rowwise`",
    ),
    Choice(
        "products of a 4-bit base",
        "model.quantization_bit",
        OnDevice("float32", "as precision"),
        OnDevice("bf16 if the GPU supports it, otherwise float32", "as precision"),
        decides="speed: `qlora 8B, chats`",
    ),
)


def here() -> dict[str, str]:
    """What a recipe with default settings uses on this machine, and why."""
    where = device()
    found = {}
    for choice in CHOICES:
        on = choice.on(where.type)
        found[choice.name] = f"{choice.here(where) if choice.here else on.used} ({on.why})"
    return found


def used_by(recipe: Recipe, trainer: Trainer) -> Mapping[str, str]:
    """What a run that is ready uses, of what a recipe can change or a check decides."""
    network = trainer.policy.network
    module, inner = network.module, network.inner
    kernel = trainer.state.kernels.packed_attention if recipe.data.packing else None
    rule = rule_of(trainer.policy.step.optimizer)
    is_fused = all(group.get("fused") for group in rule.param_groups)
    found = {
        "precision": network.options.precision,
        "weights": _dtypes(module),
        "attention": f"{kernel} (packed)" if kernel else str(inner.config._attn_implementation),
        "output head": _head(network),
        "optimizer": type(rule).__name__.removeprefix("Fused") + (", fused" if is_fused else ""),
        "compilation": "on" if recipe.model.compile else "off",
    }
    if recipe.model.float8 is not None:
        found["float8"] = recipe.model.float8
    if count := count_fused(module):
        found["LoRA"] = f"fused in {count:,} layers"
    return found


def _dtypes(module: nn.Module) -> str:
    kinds = {
        "trained": {str(p.dtype)[6:] for p in module.parameters() if p.requires_grad},
        "frozen": {str(p.dtype)[6:] for p in module.parameters() if not p.requires_grad},
    }
    return "; ".join(f"{kind}: {', '.join(sorted(of))}" for kind, of in kinds.items() if of)


def _head(network: Network) -> str:
    if network.engine.runner.head is None:
        return "full logits of trained positions"
    return "chunked cross entropy"
