"""Every optimizer beside its reference implementations: update time, memory, loss and weights.

    .venv/bin/python benchmarks/optimizers.py [--references DIR] [--steps 60] [--rounds 3]

A random Llama (3.3 M parameters) is trained on the bytes of the bundled orders: the same batches
for all, from the same weights. Each side runs in a process of its own, and sides take turns. DIR is
where the packages of ``requirements-optimizers.txt`` are; torch's references need none. ``update``
is processor time of the one thread, so that a busy machine does not change it much. ``state``
is what the optimizer keeps, ``peak`` the most memory of the process beyond what it had before the
optimizer was built, ``loss`` the mean over the last 20 steps. ``weights`` is the distance of the
weights of both after the steps, as a share of the way that Surefoot's went; after the first steps
it is the difference of the rules, later that of two trainings that rounding has led apart.
"""

from __future__ import annotations

import argparse
import importlib
import math
import multiprocessing
import pickle
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from measure import machine, say
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from surefoot.network._parameter_names import kinds_of
from surefoot.optim import OPTIMIZERS

DATA = Path(__file__).parent.parent / "examples" / "data" / "orders_train.jsonl"
ROWS, WIDTH, LAST, FIRST = 8, 96, 20, 3
WIDE = {"rank": 32, "update_gap": 50}
SETTINGS: dict[str, dict[str, object]] = {
    "adamw": {},
    "adamw_bf16": {},
    "adamw_8bit": {},
    "adamw_4bit": {},
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
    peak: int  # bytes
    loss: float
    weights: torch.Tensor  # after ``FIRST`` steps, and at the end
    start: torch.Tensor


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


@dataclass(frozen=True)
class Case:
    """What a reference is built from."""

    module: nn.Module
    settings: dict[str, object]  # lr, no weight decay
    rank: int

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All of them."""
        return list(self.module.parameters())

    @property
    def split(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Matrices inside layers, and the rest."""
        return split(list(self.module.named_parameters()), self.module)

    def low_rank(self, **more: object) -> list[dict[str, object]]:
        """Groups of an optimizer that projects matrices."""
        matrices, others = self.split
        usual = {"rank": self.rank, "update_proj_gap": 50, "scale": 1.0, "proj_type": "std"}
        return [{"params": others}, {"params": matrices, **usual, **more}]


Built = torch.optim.Optimizer | list[torch.optim.Optimizer]


def of_all(package: str, name: str, **more: object) -> Callable[[Case], Built]:
    """The class ``name`` of ``package``, of all parameters."""
    return lambda case: found(package, name)(case.parameters, **case.settings, **more)


def of_low_rank(package: str, name: str, **more: object) -> Callable[[Case], Built]:
    """The same with settings of matrices, and the epsilon of torch's Adam, which is not theirs."""
    of_groups = {key: more.pop(key) for key in ("proj", "scale_type") if key in more}
    usual = {"eps": 1e-8, **more}
    return lambda case: found(package, name)(case.low_rank(**of_groups), **case.settings, **usual)


def found(package: str, name: str) -> Callable[..., torch.optim.Optimizer]:
    """A class; raises ``ImportError`` if the package is not installed."""
    return getattr(importlib.import_module(package), name)


def torch_muon(case: Case) -> Built:
    """Muon for matrices inside layers, AdamW for the rest."""
    matrices, others = case.split
    own = torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **case.settings)
    return [own, torch.optim.AdamW(others, **case.settings)]


def adam_mini(case: Case) -> Built:
    """The authors' own."""
    sizes = {"dim": 256, "n_heads": 4, "verbose": False}
    named = case.module.named_parameters()
    return found("adam_mini", "Adam_mini")(named, **sizes, **case.settings)


def other_adam_mini(case: Case) -> Built:
    """Another, which gets the model."""
    sizes = {"num_embeds": 256, "num_heads": 4}
    return found("pytorch_optimizer", "AdamMini")(case.module, **sizes, **case.settings)


APOLLO = {"proj": "random", "scale_type": "channel"}
REFERENCES: dict[str, dict[str, Callable[[Case], Built]]] = {
    "adamw": {"torch": of_all("torch.optim", "AdamW", fused=True)},
    "adamw_bf16": {"torch, float32": of_all("torch.optim", "AdamW", fused=True)},
    "adamw_8bit": {
        "bitsandbytes": of_all("bitsandbytes.optim", "AdamW8bit"),
        "torchao": of_all("torchao.optim", "AdamW8bit"),
        "torch, float32": of_all("torch.optim", "AdamW", fused=True),
    },
    "adamw_4bit": {
        "torchao": of_all("torchao.optim", "AdamW4bit"),
        "torch, float32": of_all("torch.optim", "AdamW", fused=True),
    },
    "muon": {"torch": torch_muon},
    "lion": {
        "lion-pytorch": of_all("lion_pytorch", "Lion"),
        "pytorch-optimizer": of_all("pytorch_optimizer", "Lion"),
    },
    "ademamix": {"pytorch-optimizer": of_all("pytorch_optimizer", "AdEMAMix")},
    "adafactor": {"torch": of_all("torch.optim", "Adafactor")},
    "adam_mini": {"adam-mini": adam_mini, "pytorch-optimizer": other_adam_mini},
    "apollo": {"apollo-torch": of_low_rank("apollo_torch", "APOLLOAdamW", **APOLLO)},
    "galore": {
        "galore-torch": of_low_rank("galore_torch", "GaLoreAdamW", no_deprecation_warning=True)
    },
    "schedule_free": {"schedulefree": of_all("schedulefree", "AdamWScheduleFree")},
}


def settings_of(name: str) -> dict[str, object]:
    """Surefoot's settings."""
    return {"learning_rate": 1e-3, **SETTINGS[name]}


def reference(name: str, label: str, module: nn.Module) -> list[torch.optim.Optimizer]:
    """The reference implementation with the same settings; raises ``ImportError`` without it."""
    settings = settings_of(name)
    same = {"lr": settings["learning_rate"], "weight_decay": 0.0}
    built = REFERENCES[name][label](Case(module, same, settings.get("rank", 0)))
    return built if isinstance(built, list) else [built]


def ours(name: str, module: nn.Module) -> list[torch.optim.Optimizer]:
    """Surefoot's."""
    named = list(module.named_parameters())
    own = OPTIMIZERS[name](**settings_of(name))
    return [own.build(named, kinds_of(module, dict(named)))]


def resident(key: str = "VmRSS") -> int:
    """Bytes of memory of this process, now or at most (``VmHWM``)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(key))


def run(name: str, label: str, steps: int) -> Figures:
    """Train with one side: Surefoot's without a ``label``."""
    module = model()
    start_weights = flat(module)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = resident()
    optimizers = reference(name, label, module) if label else ours(name, module)
    seconds, losses, weights = [], [], []
    for step, ids in enumerate(batches(steps), 1):
        switch(optimizers, "train", for_gradients=True)
        loss = module(input_ids=ids, labels=ids).loss
        loss.backward()
        start = time.thread_time()
        for optimizer in optimizers:
            optimizer.step()
        seconds.append(time.thread_time() - start)
        switch(optimizers, "eval", for_gradients=False)
        module.zero_grad()
        losses.append(float(loss.detach()))
        if step in (FIRST, steps):
            weights.append(flat(module))
    held = [*(one for optimizer in optimizers for one in tensors(optimizer.state))]
    state, peak = sum(one.numel() * one.element_size() for one in held), resident("VmHWM") - before
    mean = sum(losses[-LAST:]) / len(losses[-LAST:])
    return Figures(median(seconds[1:]), state, peak, mean, torch.stack(weights), start_weights)


def flat(module: nn.Module) -> torch.Tensor:
    """All weights."""
    return torch.cat([one.detach().flatten() for one in module.parameters()])


def switch(optimizers: Sequence[object], theirs: str, *, for_gradients: bool) -> None:
    """Schedule-free optimizers have other weights for gradients."""
    for optimizer in optimizers:
        if hasattr(optimizer, "move"):
            optimizer.move(for_gradients=for_gradients)
        elif type(optimizer).__module__.startswith("schedulefree"):
            getattr(optimizer, theirs)()


def child(path: str, name: str, label: str, steps: int) -> None:
    """One side, in a process of its own."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        found: Figures | str = run(name, label, steps)
    except Exception as error:  # a package that is missing, or needs a GPU
        found = f"{type(error).__name__}: {error}"[:90]
    Path(path).write_bytes(pickle.dumps(found))


def measured(name: str, label: str, steps: int) -> Figures | str:
    """The figures, or why there are none."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/figures"
        context = multiprocessing.get_context("fork")
        process = context.Process(target=child, args=(path, name, label, steps))
        process.start()
        process.join()
        if process.exitcode:
            return f"ended with code {process.exitcode}"
        return pickle.loads(Path(path).read_bytes())


def tensors(value: object) -> Iterator[torch.Tensor]:
    """All tensors in a state, those inside of other tensors and of objects as well."""
    if isinstance(value, torch.Tensor) and hasattr(value, "__tensor_flatten__"):
        yield from (getattr(value, name) for name in value.__tensor_flatten__()[0])
    elif isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from tensors(one)
    elif hasattr(value, "__dict__"):
        yield from tensors(vars(value))


def row(name: str, found: Sequence[Figures], own: Figures) -> str:
    """One line of the table."""
    milliseconds = [1e3 * one.seconds for one in found]
    least, most = min(milliseconds), max(milliseconds)
    mib = [median(getattr(one, key) for one in found) / 2**20 for key in ("state", "peak")]
    apart = (found[0].weights - own.weights).norm(dim=1) / (own.weights - own.start).norm(dim=1)
    weights = "" if found[0] is own else f"{apart[0]:.1e}, {apart[1]:.1e}"
    return (
        f"| {name} | {median(milliseconds):.1f} ({least:.1f}-{most:.1f}) | {mib[0]:.1f} | "
        f"{mib[1]:.1f} | {found[0].loss:.4f} | {weights} |"
    )


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--references", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=list(SETTINGS))
    given = parser.parse_args()
    if given.references is not None:
        sys.path.append(str(given.references))
    torch.set_num_threads(1)
    say(machine())
    size = sum(p.numel() for p in model().parameters())
    say(f"{size:,} parameters, {given.steps} steps of {ROWS} x {WIDTH} bytes")
    say(f"loss at chance: {math.log(256):.4f}")
    say(f"| optimizer | update, ms | state, MiB | peak, MiB | loss | weights, {FIRST} steps, end |")
    say("|---|---|---|---|---|---|")
    for name in given.only:
        sides: dict[str, list[Figures | str]] = {label: [] for label in ("", *REFERENCES[name])}
        for _ in range(given.rounds):
            for label, found in sides.items():
                found.append(measured(name, label, given.steps))
        own = sides[""][0]
        assert isinstance(own, Figures), own
        for label, found in sides.items():
            figures = [one for one in found if isinstance(one, Figures)]
            title = f"{name}, {label}" if label else f"**{name}**"
            say(row(title, figures, own) if figures else f"| {title} | {found[0]} | | | | |")


if __name__ == "__main__":
    main()
