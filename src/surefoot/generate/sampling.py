"""The recipe's ``generate`` section as transformers' generation config."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import GenerationConfig

from .section import GenerateSection


def generation_config(
    section: GenerateSection, *, max_new_tokens: int, stop_token_ids: Sequence[int]
) -> GenerationConfig:
    """All settings of generation, without those of the model's own files.

    Args:
        section: temperature and so on; they have no effect unless it samples.
        max_new_tokens: at most ``section.max_new_tokens``.
        stop_token_ids: a response ends before the first of these.
    """
    stops = list(stop_token_ids)
    settings: dict[str, object] = {
        "max_new_tokens": max_new_tokens,
        "do_sample": section.do_sample,
        "repetition_penalty": section.repetition_penalty,
        "eos_token_id": stops or None,
        "pad_token_id": padding(stop_token_ids),
    }
    if section.do_sample:
        settings |= {name: getattr(section, name) for name in ("temperature", "top_p", "top_k")}
    return GenerationConfig(**settings)


def padding(stop_token_ids: Sequence[int]) -> int:
    """The padding id of a batch: masked before a prompt, removed after a response."""
    return stop_token_ids[0] if stop_token_ids else 0
