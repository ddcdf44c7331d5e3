"""Rollouts: Surefoot's generation beside transformers' ``generate`` and its continuous batching.

    .venv/bin/python benchmarks/rollout.py [--repetitions 5] [--threads 1] [--slots 64]
    .venv/bin/python benchmarks/rollout.py --products

64 prompts with 8 samples each, at temperature 1, in one process, in turns. Ours are sampled first;
``generate`` is then made to sample the same tokens, in batches of prompts of similar length, and
continuous batching as many for each prompt. Speeds are generated tokens per CPU second.
``--products`` compares torch's products of matrices with oneDNN's, which sampling has on a CPU.
"""

from __future__ import annotations

import argparse
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from statistics import median

import torch
from measure import machine, say
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from surefoot.generate.generation import Chooser, Sample, sample
from surefoot.generate.onednn import onednn_products
from surefoot.generate.section import GenerateSection

PROMPTS, SAMPLES = 64, 8
Ids = Sequence[int]
Responses = Mapping[int, Sample]


def random_model(hidden: int, layers: int, vocabulary: int) -> PreTrainedModel:
    """A Qwen3 of random weights."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=hidden * 3,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 128),
        head_dim=64,
    )
    found = Qwen3ForCausalLM._from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    return found.eval()


def prompts_of(vocabulary: int, lengths: Sequence[int]) -> list[list[int]]:
    """Random ids, each prompt as often as it is sampled."""
    numbers = random.Random(0)
    each = [
        [numbers.randrange(3, vocabulary) for _ in range(numbers.choice(lengths))]
        for _ in range(PROMPTS)
    ]
    return [prompt for prompt in each for _ in range(SAMPLES)]


class Forced(LogitsProcessor):  # type: ignore[misc]
    """Leaves each row the token that is to be sampled."""

    def __init__(self, responses: Sequence[Sample], filler: int) -> None:
        longest = max(len(one.ids) for one in responses)
        rows = [[*one.ids, *[filler] * (longest - len(one.ids))] for one in responses]
        self._ids, self._step = torch.tensor(rows), 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """[B, V] scores of one token a row."""
        found = torch.full_like(scores, -torch.inf)
        found.scatter_(1, self._ids[:, self._step, None], 0.0)
        self._step += 1
        return found


def generate(
    model: PreTrainedModel, prompts: Sequence[Ids], wanted: Responses, stops: Ids, slots: int
) -> int:
    """The same tokens from ``generate``."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    total = 0
    for start in range(0, len(order), slots):
        batch = order[start : start + slots]
        longest = max(len(prompts[i]) for i in batch)
        missing = [longest - len(prompts[i]) for i in batch]
        rows = [[0] * n + list(prompts[i]) for i, n in zip(batch, missing, strict=True)]
        mask = [[0] * n + [1] * (longest - n) for n in missing]
        responses = [wanted[i] for i in batch]
        count = max(len(one.ids) for one in responses)
        config = GenerationConfig(
            max_new_tokens=count, do_sample=True, eos_token_id=list(stops), pad_token_id=0, top_k=0
        )
        found = model.generate(
            input_ids=torch.tensor(rows),
            attention_mask=torch.tensor(mask),
            generation_config=config,
            logits_processor=LogitsProcessorList([Forced(responses, stops[0])]),
        )[:, longest:].tolist()
        for row, one in zip(found, responses, strict=True):
            assert tuple(row[: len(one.ids)]) == one.ids
            total += len(one.ids)
    return total


def continuous(
    model: PreTrainedModel, prompts: Sequence[Ids], wanted: Responses, slots: int
) -> int:
    """As many tokens of each prompt from transformers' continuous batching."""
    config = GenerationConfig(do_sample=True, eos_token_id=-1, pad_token_id=0, top_k=0)
    longest = max(len(p) + len(wanted[i].ids) for i, p in enumerate(prompts))
    batching = ContinuousBatchingConfig(
        max_requests_per_batch=slots,
        max_batch_tokens=1024,
        page_size=64,
        num_blocks=slots * (longest // 64 + 2),
    )
    total, before = 0, model.config._attn_implementation
    with model.continuous_batching_context_manager(
        generation_config=config, continuous_batching_config=batching, block=True
    ) as manager:
        for index, prompt in enumerate(prompts):
            manager.add_request(list(prompt), max_new_tokens=len(wanted[index].ids))
        done = 0
        while done < len(prompts):
            result = manager.get_result(timeout=60)
            if result is None:
                raise SystemExit("continuous batching has stopped")
            if result.is_finished():
                done += 1
                total += len(result.generated_tokens)
    model.set_attn_implementation(before)
    return total


def compare(name: str, model: PreTrainedModel, args: argparse.Namespace, most: int) -> None:
    """All ways in turns, and their speeds."""
    vocabulary = model.config.vocab_size
    prompts = prompts_of(vocabulary, [16, 32, 64, 96, 128])
    stops = list(range(3, 3 + vocabulary // (most // 2)))  # a token in 64 or so ends a response
    section = GenerateSection(max_new_tokens=most, do_sample=True, batch_size=args.slots)
    wanted = sample(model, prompts, Chooser(section, frozenset(stops)), seed=1)
    ways: dict[str, Callable[[], int]] = {
        "surefoot": lambda: _ours(model, prompts, section, stops, wanted),
        "generate": lambda: generate(model, prompts, wanted, stops, args.slots),
    }
    if not args.skip_continuous:
        ways["continuous batching"] = lambda: continuous(model, prompts, wanted, args.slots)
    lengths = sorted(len(one.ids) for one in wanted.values())
    say(f"{name}: responses of {lengths[0]} to {lengths[-1]} tokens, median {median(lengths)}")
    costs: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    count = sum(lengths)
    for _ in range(args.repetitions):
        for way, work in ways.items():
            wall, cpu = time.monotonic(), time.process_time()
            assert work() == count, way
            costs[way].append((time.monotonic() - wall, time.process_time() - cpu))
        say(", ".join(f"{way} {found[-1][1]:.1f}" for way, found in costs.items()) + " CPU seconds")
    for way, found in costs.items():
        speeds = sorted(count / cpu for _, cpu in found)
        ratios = sorted(one[1] / own[1] for one, own in zip(found, costs["surefoot"], strict=True))
        say(
            f"| {name} | {way} | {median(speeds):,.0f} ({speeds[0]:,.0f} - {speeds[-1]:,.0f}) | "
            f"{median(wall for wall, _ in found):.1f} | "
            f"{median(ratios):.2f}x ({ratios[0]:.2f} - {ratios[-1]:.2f}) |"
        )


def _ours(
    model: PreTrainedModel,
    prompts: Sequence[Ids],
    section: GenerateSection,
    stops: Ids,
    wanted: Responses,
) -> int:
    found = sample(model, prompts, Chooser(section, frozenset(stops)), seed=1)
    assert found == wanted
    return sum(len(one.ids) for one in found.values())


def products(repetitions: int) -> None:
    """GFLOP/s of a linear layer of 512 inputs and 1,536 outputs, by numbers of rows, in turns."""
    layer = torch.nn.Linear(512, 1536)
    say("| rows | torch's, GFLOP/s | oneDNN's, GFLOP/s |\n| --- | --- | --- |")
    for rows in (4, 64, 1024):
        x = torch.randn(1, rows, 512)
        found: tuple[list[float], list[float]] = [], []
        for _ in range(repetitions * 10):
            for speeds, block in zip(found, (nullcontext(), onednn_products(layer)), strict=True):
                with block:
                    cpu = time.process_time()
                    for _ in range(20):
                        layer(x)
                    speeds.append(2e-9 * 20 * rows * 512 * 1536 / (time.process_time() - cpu))
        cells = (f"{median(one):.0f} ({min(one):.0f} - {max(one):.0f})" for one in found)
        say(f"| {rows} | {' | '.join(cells)} |")


def main() -> None:
    """Compare the ways on each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--model", help="a model folder beside the random one")
    parser.add_argument("--skip-continuous", action="store_true")
    parser.add_argument("--only", choices=["small", "large"])
    parser.add_argument("--products", action="store_true", help="only those of matrices")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    say(machine())
    logging.getLogger("transformers").setLevel(logging.ERROR)
    if args.products:
        with torch.no_grad():
            products(args.repetitions)
        return
    say("| model | way | tokens per CPU second | wall s | CPU seconds, times ours |")
    with torch.no_grad():
        if args.model:
            given = AutoModelForCausalLM.from_pretrained(args.model).eval()
            compare(args.model, given, args, 128)
        if args.only != "large":
            compare("5 M", random_model(256, 4, 4_000), args, 128)
        if args.only != "small":
            compare("27 M", random_model(512, 6, 8_000), args, 128)


if __name__ == "__main__":
    main()
