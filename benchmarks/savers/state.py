"""The state that every subject saves: a Qwen2 in float32 and its Adam moments; and its peak."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import costs
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from surefoot.checkpoint import NamedOptimizer

HIDDEN, VOCABULARY = 640, 16_384


def model(layers: int) -> Qwen2ForCausalLM:
    """About 89 million parameters with 12 layers."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=4 * HIDDEN,
        num_hidden_layers=layers,
        num_attention_heads=10,
        num_key_value_heads=10,
        tie_word_embeddings=True,
    )
    return Qwen2ForCausalLM(config)


def optimizer(made: torch.nn.Module) -> torch.optim.AdamW:
    """Adam with moments that are there."""
    found = torch.optim.AdamW(made.parameters(), lr=1e-5, fused=True)
    for parameter in made.parameters():
        parameter.grad = torch.randn_like(parameter)
    found.step()
    found.zero_grad()
    return found


def tensors(made: torch.nn.Module, adam: torch.optim.AdamW) -> dict[str, torch.Tensor]:
    """All of it under flat names."""
    names = {parameter: name for name, parameter in made.named_parameters()}
    moments = {
        f"{names[parameter]}.{key}": value
        for parameter, state in adam.state.items()
        for key, value in state.items()
    }
    return {**{name: p.detach() for p, name in names.items()}, **moments}


class Weights:
    """The model's parameters, tied ones once."""

    def __init__(self, made: torch.nn.Module) -> None:
        self.made = made

    def state_dict(self) -> dict[str, torch.Tensor]:
        """By name."""
        return {name: p.detach() for name, p in self.made.named_parameters()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """They were read into directly."""


def states(made: torch.nn.Module, adam: torch.optim.AdamW) -> dict[str, object]:
    """What Surefoot saves."""
    return {"model": Weights(made), "optimizer": NamedOptimizer(adam, made.named_parameters())}


def timed(work: Callable[[], object]) -> dict[str, float]:
    """Seconds, those of the processor, children included, and the peak of resident memory above
    what was there before."""
    Path("/proc/self/clear_refs").write_text("5")
    before, cpu, began = memory("VmRSS"), costs.cpu(), time.perf_counter()
    work()
    return {
        "seconds": time.perf_counter() - began,
        "cpu": costs.cpu() - cpu,
        "peak_mb": (memory("VmHWM") - before) / 1000,
    }


def memory(name: str) -> int:
    """In kB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))
