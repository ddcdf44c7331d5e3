"""Every optimizer beside its reference implementation: update time, memory, and loss.

    .venv/bin/python benchmarks/optimizers.py [--references DIR] [--steps 150] [--rounds 3]

A random Llama (3.3 M parameters) is trained on the bytes of the bundled orders: the same batches
for all, from the same weights. Each side runs in a process of its own, and sides take turns. DIR is
where the packages of ``requirements-optimizers.txt`` are; torch's references need none. ``state``
is what the optimizer keeps, ``update`` what an update takes besides, ``loss`` the mean over the
last 20 steps.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from measure import say
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from surefoot.network.parameter_kinds import kinds_of
from surefoot.optim import OPTIMIZERS

DATA = Path(__file__).parent.parent / "examples" / "data" / "orders_train.jsonl"
ROWS, WIDTH, LAST = 8, 96, 20
WIDE = {"rank": 32, "update_gap": 50}
SETTINGS: dict[str, dict[str, object]] = {
    "adamw": {},
    "adamw_bf16": {},
    "adamw_8bit": {},
    "muon": {},
    "lion": {"learning_rate": 2e-4},
    "ademamix": {},
    "adafactor": {"learning_rate": 0.02},
    "adam_mini": {},
    "apollo": WIDE,
    "galore": {**WIDE, "scale": 1.0},
    "schedule_free": {"learning_rate": 2e-3},
}
Named = list[tuple[str, nn.Parameter]]


@dataclass(frozen=True)
class Figures:
    """What one run of one side gave."""

    seconds: float  # the median of an update
    state: int  # bytes
    update: int  # bytes
    loss: float


def model() -> LlamaForCausalLM:
    """The same random weights for all."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 256}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads))


def batches(steps: int) -> Iterator[torch.Tensor]:
    """The same bytes for all."""
    text = torch.frombuffer(bytearray(DATA.read_bytes()), dtype=torch.uint8).long()
    drawn = torch.Generator().manual_seed(1)
    for _ in range(steps):
        starts = torch.randint(len(text) - WIDTH, (ROWS,), generator=drawn)
        yield torch.stack([text[start : start + WIDTH] for start in starts.tolist()])


def split(named: Named, module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Matrices inside layers, and the rest."""
    known = kinds_of(module, dict(named))
    matrices = [p for name, p in named if known[name].is_matrix]
    return matrices, [p for name, p in named if not known[name].is_matrix]


def reference(name: str, module: nn.Module) -> list[torch.optim.Optimizer]:
    """The reference implementation with the same settings; raises ``ImportError`` without it."""
    named = list(module.named_parameters())
    own = OPTIMIZERS[name](**{"learning_rate": 1e-3, **SETTINGS[name]})
    parameters, lr = [p for _, p in named], own.learning_rate
    matrices, others = split(named, module)
    rest = torch.optim.AdamW(others, lr=lr, weight_decay=0.0)
    projected = {"rank": own.rank, "update_proj_gap": 50} if hasattr(own, "rank") else {}
    if name == "adamw_8bit":
        from bitsandbytes.optim import AdamW8bit

        return [AdamW8bit(parameters, lr=lr, weight_decay=0.0)]
    if name.startswith("adamw"):
        return [torch.optim.AdamW(parameters, lr=lr, weight_decay=0.0, fused=True)]
    if name == "muon":
        usual = {"lr": lr, "weight_decay": 0.0, "adjust_lr_fn": "match_rms_adamw"}
        return [torch.optim.Muon(matrices, **usual), rest]
    if name == "adafactor":
        return [torch.optim.Adafactor(parameters, lr=lr)]
    if name == "schedule_free":
        from schedulefree import AdamWScheduleFree

        return [AdamWScheduleFree(parameters, lr=lr)]
    if name == "galore":
        from galore_torch import GaLoreAdamW

        group = {"params": matrices, "scale": 1.0, "proj_type": "std", **projected}
        return [GaLoreAdamW([{"params": others}, group], lr=lr, no_deprecation_warning=True)]
    if name == "apollo":
        from apollo_torch import APOLLOAdamW

        more = {"proj": "random", "scale_type": "channel", "scale": 1.0, "proj_type": "std"}
        group = {"params": matrices, **more, **projected}
        return [APOLLOAdamW([{"params": others}, group], lr=lr)]
    import pytorch_optimizer

    if name == "lion":
        return [pytorch_optimizer.Lion(parameters, lr=lr)]
    if name == "ademamix":
        return [pytorch_optimizer.AdEMAMix(parameters, lr=lr)]
    return [pytorch_optimizer.AdamMini(module, lr=lr, num_embeds=256, num_heads=4)]


def ours(name: str, module: nn.Module) -> list[torch.optim.Optimizer]:
    """Surefoot's."""
    named = list(module.named_parameters())
    own = OPTIMIZERS[name](**{"learning_rate": 1e-3, **SETTINGS[name]})
    return [own.build(named, kinds_of(module, dict(named)))]


def resident(key: str = "VmRSS") -> int:
    """Bytes of memory of this process, now or at most (``VmHWM``)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(key))


def run(build: Callable[[str, nn.Module], list[torch.optim.Optimizer]], name: str, steps: int):
    """Train with one side."""
    module = model()
    optimizers = build(name, module)
    seconds, losses, growth = [], [], []
    for ids in batches(steps):
        switch(optimizers, "train", for_gradients=True)
        loss = module(input_ids=ids, labels=ids).loss
        loss.backward()
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
        before, start = resident(), time.perf_counter()
        for optimizer in optimizers:
            optimizer.step()
        seconds.append(time.perf_counter() - start)
        growth.append(resident("VmHWM") - before)
        switch(optimizers, "eval", for_gradients=False)
        module.zero_grad()
        losses.append(float(loss.detach()))
    held = [*(one for optimizer in optimizers for one in tensors(optimizer.state))]
    state = sum(tensor.numel() * tensor.element_size() for tensor in held)
    mean = sum(losses[-LAST:]) / LAST
    return Figures(median(seconds[1:]), state, int(median(growth[1:])), mean)


def switch(optimizers: Sequence[object], theirs: str, *, for_gradients: bool) -> None:
    """Schedule-free optimizers have other weights for gradients."""
    for optimizer in optimizers:
        if hasattr(optimizer, "move"):
            optimizer.move(for_gradients=for_gradients)
        elif type(optimizer).__module__.startswith("schedulefree"):
            getattr(optimizer, theirs)()


def tensors(value: object) -> Iterator[torch.Tensor]:
    """All tensors in a state, those inside of objects as well."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from tensors(one)
    elif hasattr(value, "__dict__"):
        yield from tensors(vars(value))


def child(queue, is_ours: bool, name: str, steps: int) -> None:
    """One side, in a process of its own."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        queue.put(run(ours if is_ours else reference, name, steps))
    except Exception as error:  # a package that is missing, or needs a GPU
        queue.put(f"{type(error).__name__}: {error}"[:90])


def measured(is_ours: bool, name: str, steps: int) -> Figures | str:
    """The figures, or why there are none."""
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=child, args=(queue, is_ours, name, steps))
    process.start()
    found = queue.get(timeout=600)
    process.join()
    return found


def row(name: str, found: Sequence[Figures]) -> str:
    """One line of the table."""
    milliseconds = [1e3 * one.seconds for one in found]
    least, most = min(milliseconds), max(milliseconds)
    mib = [median(getattr(one, key) for one in found) / 2**20 for key in ("state", "update")]
    return (
        f"| {name} | {median(milliseconds):.1f} ({least:.1f}-{most:.1f}) | {mib[0]:.1f} | "
        f"{mib[1]:.1f} | {found[0].loss:.4f} |"
    )


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--references", type=Path)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=list(SETTINGS))
    given = parser.parse_args()
    if given.references is not None:
        sys.path.append(str(given.references))
    torch.set_num_threads(1)
    size = sum(p.numel() for p in model().parameters())
    say(f"{size:,} parameters, {given.steps} steps of {ROWS} x {WIDTH} bytes")
    say(f"loss at chance: {math.log(256):.4f}")
    say("| optimizer | update, ms | state, MiB | update, MiB | loss |\n|---|---|---|---|---|")
    for name in given.only:
        sides: dict[str, list[Figures | str]] = {name: [], f"{name}, reference": []}
        for _ in range(given.rounds):
            for side, found in sides.items():
                found.append(measured(side == name, name, given.steps))
        for side, found in sides.items():
            figures = [one for one in found if isinstance(one, Figures)]
            say(row(side, figures) if figures else f"| {side} | {found[0]} | | | |")


if __name__ == "__main__":
    main()
