"""BAdam and LISA beside full tuning, LoRA, and BAdam's own implementation: the same model and data.

    .venv/bin/python benchmarks/layers_in_turn.py [--steps 24] [--interval 4] [--repetitions 3]
    .venv/bin/python benchmarks/layers_in_turn.py --hidden 128 --layers 4 --steps 450 --interval 50

A model of 26 M parameters (8 layers) with random weights, or a smaller one, is trained on the
bundled corpus: the same batches in the same order for all. Every subject is a process of its own.
Memory is the peak of its resident set, less what it had with all packages imported and no model.
The reference is the package ``badam`` (1.4), and is left out where that is not installed; its
weight decay is torch's default of 0.01 whatever is asked for, so all have 0.01, and its first block
is trained for one step less than the others, so one row has the same with ours. In ratio mode
nothing decays, as there it cannot.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import psutil
import torch
from measure import machine, say
from transformers import AutoTokenizer, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from surefoot.methods._badam import LISA, BAdam, BAdamRatio
from surefoot.methods._full import Full
from surefoot.methods._lora import LoRA
from surefoot.network._parameter_names import names_by_part
from surefoot.optim._variants.adamw import AdamW
from surefoot.optim.trained import TrainedParameters

EXAMPLES = Path(__file__).parent.parent / "examples"
RATE, DECAY, RATIO = 1e-3, 0.01, 0.125
OURS = {
    "full": lambda _: Full(),
    "lora, rank 8": lambda _: LoRA(rank=8),
    "badam": lambda interval: BAdam(switch_interval=interval),
    "badam, switching one step earlier": lambda interval: BAdam(switch_interval=interval),
    "lisa, 2 layers": lambda interval: LISA(switch_interval=interval),
    "badam_ratio, adjacent": lambda interval: BAdamRatio(
        update_ratio=RATIO, switch_interval=interval
    ),
    "badam_ratio, scatter": lambda interval: BAdamRatio(
        update_ratio=RATIO, switch_interval=interval, mask="scatter"
    ),
}
REFERENCES = ["badam 1.4", "badam 1.4, ratio, adjacent", "badam 1.4, ratio, scatter"]
Optimizers = Callable[[int], torch.optim.Optimizer]


def model_of(hidden: int, layers: int) -> PreTrainedModel:
    """The same random weights for all."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=2048,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        head_dim=64,
        tie_word_embeddings=False,
    )
    return Qwen3ForCausalLM(config)


def batches(steps: int, rows: int = 4, length: int = 64) -> Iterator[torch.Tensor]:
    """[rows, length] tokens of the bundled orders, the same for all."""
    tokenizer = AutoTokenizer.from_pretrained(EXAMPLES / "base-model")
    lines = (EXAMPLES / "data" / "orders_train.jsonl").read_text(encoding="utf-8").splitlines()
    rows_of = [json.loads(line) for line in lines[:1000]]
    text = "\n".join(f"{row['input']} {row['output']}" for row in rows_of)
    ids = torch.tensor(tokenizer(text).input_ids) % 2048
    starts = random.Random(0)
    for _ in range(steps):
        places = [starts.randrange(len(ids) - length) for _ in range(rows)]
        yield torch.stack([ids[place : place + length] for place in places])


def ours(model: PreTrainedModel, name: str, interval: int) -> tuple[torch.nn.Module, Optimizers]:
    """The module to train, and its optimizer at each step."""
    method = OURS[name](interval)
    module = method.apply(model)
    named = {n: p for n, p in module.named_parameters() if p.requires_grad}
    parts = names_by_part(module, model, {n: n for n, _ in module.named_parameters()})
    optim = AdamW(learning_rate=RATE, weight_decay=0.0 if "ratio" in name else DECAY)
    blocks = method.trainable(parts, 0)
    trained = TrainedParameters(optim, named, blocks.trainable, entries=blocks.entries)
    return module, lambda step: trained.at(step + ("earlier" in name))


def reference(
    model: PreTrainedModel, name: str, interval: int
) -> tuple[torch.nn.Module, Optimizers]:
    """The same with the package."""
    from badam import BlockOptimizer, BlockOptimizerRatio

    if "ratio" in name:
        sparse = BlockOptimizerRatio(
            [{"params": list(model.parameters())}],
            list(model.named_parameters()),
            update_ratio=RATIO,
            switch_every=interval,
            mask_mode=name.rpartition(" ")[2],
            lr=RATE,
        )
        return model, lambda _step: sparse
    base = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY, fused=True)
    made = BlockOptimizer(
        base,
        list(model.named_parameters()),
        switch_block_every=interval,
        switch_mode="ascending",
        verbose=0,
    )
    return model, lambda _step: made


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of moments, and of copies of weights."""
    inner = getattr(optimizer, "base_optimizer", optimizer)
    held = [t for state in inner.state.values() for t in state.values() if torch.is_tensor(t)]
    copies = getattr(optimizer, "param_idx2hp", {}).values()
    return sum(t.nbytes for t in (*held, *copies))


def run(name: str, chosen: argparse.Namespace) -> dict[str, object]:
    """Train one subject in this process."""
    process = psutil.Process()
    data = list(batches(chosen.steps))
    before = process.memory_info().rss
    model = model_of(chosen.hidden, chosen.layers)
    build = reference if name in REFERENCES else ours
    module, optimizer_at = build(model, name, chosen.interval)
    module.train()
    gc.collect()
    losses, seconds, state, peak = [], [], 0, 0

    def note(*_: object) -> None:
        nonlocal peak
        peak = max(peak, process.memory_info().rss)

    for layer in model.model.layers:
        layer.register_forward_hook(note)
    for parameter in module.parameters():
        was_trainable = parameter.requires_grad
        parameter.requires_grad_(True).register_post_accumulate_grad_hook(note)
        parameter.requires_grad_(was_trainable)
    for step, ids in enumerate(data):
        started = time.perf_counter()
        optimizer = optimizer_at(step)
        loss = module(input_ids=ids, labels=ids).loss
        loss.backward()
        note()
        optimizer.step()
        note()
        state = max(state, state_bytes(optimizer))
        optimizer.zero_grad(set_to_none=True)
        seconds.append(time.perf_counter() - started)
        losses.append(loss.item())
    return {
        "seconds": median(seconds[1:]),
        "state": state,
        "peak": peak - before,
        "losses": losses,
    }


def in_child(name: str, chosen: argparse.Namespace) -> dict[str, object]:
    """The same in a process of its own."""
    command = [sys.executable, __file__, "--only", name]
    for key in ("steps", "interval", "hidden", "layers"):
        command += [f"--{key}", str(getattr(chosen, key))]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def report(found: dict[str, list[dict[str, object]]], steps: int, every: int) -> None:
    """Print the table, with the mean losses of ``every`` steps."""
    columns = [f"loss {last - every + 1} to {last}" for last in range(every, steps + 1, every)]
    print(f"| | s/step | state, MB | peak, MB | {' | '.join(columns)} |")
    print("|---" * (4 + len(columns)) + "|")
    for name, runs in found.items():
        seconds = median(float(str(one["seconds"])) for one in runs)
        state, peak = (
            median(int(str(one[key])) for one in runs) / 1e6 for key in ("state", "peak")
        )
        losses = runs[0]["losses"]
        assert isinstance(losses, list)
        means = [sum(losses[at : at + every]) / every for at in range(0, steps, every)]
        cells = " | ".join(f"{mean:.4f}" for mean in means)
        print(f"| {name} | {seconds:.2f} | {state:.1f} | {peak:.0f} | {cells} |")


def main() -> None:
    """Run all subjects in turn, several times over."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--interval", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--only", help="one subject, in this process; prints JSON")
    chosen = parser.parse_args()
    if chosen.only:
        print(json.dumps(run(chosen.only, chosen)))
        return
    print(machine())
    names = [*OURS, *(REFERENCES if find_spec("badam") else [])]
    found: dict[str, list[dict[str, object]]] = {name: [] for name in names}
    for _ in range(chosen.repetitions):
        for name in names:
            say(name)
            found[name].append(in_child(name, chosen))
    report(found, chosen.steps, chosen.interval)


if __name__ == "__main__":
    main()
