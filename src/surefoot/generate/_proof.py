"""Whether a model may be driven over slots: found by trying, once for each model.

The logits of two prompts in slots, after several tokens, must be those of one pass over all tokens
without a cache: side by side, and each alone, which may be without a mask. The longer prompt is
longer than every window that the requests exceed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn
from transformers import PretrainedConfig

from ..errors import first_line
from ..log import fell_back
from ._slots import (
    Driver,
    Masks,
    Prefix,
    candidates,
    inner_model,
    longest_limit,
    masked_attention,
)
from .responses import agree
from .section import Ids

_TRIED = "drivers_over_slots"  # an attribute of models that have been tried
_TOLD = "is_known_to_scale_by_length"  # likewise
_FIRST = "original_max_position_embeddings"
_STEPS = 4
_LENGTHS = (3, 19)


def must_be_alone(model: nn.Module, longest: int) -> bool:
    """Whether rows of up to ``longest`` tokens may have none beside them: a scaling of rotary
    embeddings (longrope) changes for all rows at the length of the longest one."""
    inner = inner_model(model)
    is_alone = _scales_by_length(inner.config.get_text_config(), longest)
    if is_alone and not vars(inner).get(_TOLD):
        vars(inner)[_TOLD] = True
        fell_back(
            f"{type(inner).__name__}: prompts are answered one by one",
            "the positions of a batch change with its longest row; a smaller "
            "generate.max_new_tokens may keep all rows below that length",
            "is slower, and generate.batch_size has no effect",
        )
    return is_alone


def _scales_by_length(config: PretrainedConfig, longest: int) -> bool:
    rope = getattr(config, "rope_parameters", None) or {}
    parts = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    scaled = [part for part in parts if part.get("rope_type") == "longrope"]
    max_positions = getattr(config, "max_position_embeddings", 0)
    default_length = getattr(config, _FIRST, max_positions)
    return any(longest > int(part.get(_FIRST) or default_length) for part in scaled)


@torch.no_grad()
def driver_of(model: nn.Module, longest: int) -> Driver | None:
    """What runs ``model`` over slots, for rows of at most ``longest`` tokens, or None if it cannot
    be run so."""
    inner = inner_model(model)
    limit = longest_limit(inner.config.get_text_config(), longest)
    kernel: str = inner.config._attn_implementation
    trials: dict[tuple[str, int], Masks | None] = vars(inner).setdefault(_TRIED, {})
    if (kernel, limit) not in trials:
        with masked_attention(inner):
            trials[kernel, limit], why = _proven(model, limit)
        if trials[kernel, limit] is None:
            fell_back(
                f"{type(inner).__name__}: responses are generated in batches by transformers",
                f"its keys and values cannot be kept in slots: {why}",
                "is slower, as each batch is as long as its longest response",
            )
    masks = trials[kernel, limit]
    return None if masks is None else Driver(model, inner, masks)


def _proven(model: nn.Module, limit: int) -> tuple[Masks | None, str]:
    """The masks that give the right logits, or why there are none."""
    why = "not all layers have keys and values of all tokens"
    inner = inner_model(model)
    config = inner.config.get_text_config()
    prompts = [
        [(7 * n + 3) % config.vocab_size for n in range(count)]
        for count in (_LENGTHS[0], max(_LENGTHS[1], limit + 2))
    ]
    forced = [[(11 * n + row) % config.vocab_size for n in range(_STEPS)] for row in range(2)]
    expected: list[torch.Tensor] = []
    for masks in candidates(config):
        driver = Driver(model, inner, masks, batch_invariant=True)
        alone = replace(driver, batch_invariant=False)
        try:
            rows = list(zip(prompts, forced, strict=True))
            expected = expected or [_in_one_pass(model, *row) for row in rows]
            prefixes = [driver.prefill([prompt])[0] for prompt in prompts]
            over_slots = _over_slots(driver, prefixes, rows)
            for prefix, row in zip(prefixes, rows, strict=True):
                over_slots += _over_slots(alone, [prefix], [row])
        except (torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:  # any model's code: what is wrong in it will show in generate
            why = f"its code fails ({first_line(error)})"
            continue
        if all(agree(*each) for each in zip(over_slots, expected * 2, strict=True)):
            return masks, ""
        why = "a trial gave other logits than a pass over the whole row"
    return None, why


def _in_one_pass(model: nn.Module, prompt: Ids, forced: Ids) -> torch.Tensor:
    """[steps, V] of the prompt's last token and the forced ones but the last."""
    ids = torch.tensor([[*prompt, *forced[:-1]]], device=inner_model(model).device)
    logits_SV: torch.Tensor = model(input_ids=ids, use_cache=False).logits[0, -_STEPS:]
    return logits_SV


def _over_slots(
    driver: Driver, prefixes: Sequence[Prefix], rows: Sequence[tuple[Ids, Ids]]
) -> list[torch.Tensor]:
    """The same of each row of a prompt and its forced tokens."""
    longest = max(len(prompt) for prompt, _ in rows) + _STEPS
    cache = driver.slots(len(rows), longest, longest)
    for slot, prefix in enumerate(prefixes):
        cache.put(slot, prefix)
    tokens, steps = [prompt[-1] for prompt, _ in rows], []
    for step in range(_STEPS):
        positions = [len(prompt) - 1 + step for prompt, _ in rows]
        steps.append(driver.decode(cache, tokens, positions))
        tokens = [forced[step] for _, forced in rows]
    return [torch.stack([logits[row] for logits in steps]) for row in range(len(rows))]
