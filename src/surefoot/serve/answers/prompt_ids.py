"""Plain prompts of a request: a text or several, or their token ids."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import ApiError
from ..running.models import ServedModel

Given = str | list[str] | list[int] | list[list[int]]


def num_prompts(given: Given) -> int:
    """Prompts of a request, known before anything is computed."""
    is_one = isinstance(given, str) or (given and isinstance(given[0], int))
    return 1 if is_one else len(given)


def prompts_of(model: ServedModel, given: Given, param: str) -> list[list[int]]:
    """The token ids of each prompt. Raises ``ApiError``: one is empty, too long, or has ids outside
    the vocabulary."""
    for text in [given] if isinstance(given, str) else given:
        if isinstance(text, str):
            check_length(model, len(text), param)
    found = _ids(model, given)
    if not found:
        raise ApiError("the prompt is empty", param=param)
    for prompt in found:
        check_prompt(model, prompt, param)
    return found


def check_prompt(model: ServedModel, prompt: Sequence[int], param: str) -> None:
    """Raise ``ApiError`` if the model cannot read ``prompt``."""
    vocabulary = model.vocabulary
    if not prompt:
        raise ApiError("the prompt is empty", param=param)
    if len(prompt) > model.longest:
        raise too_long(model, f"{len(prompt):,} tokens", param)
    outside = next((one for one in (min(prompt), max(prompt)) if not 0 <= one < vocabulary), None)
    if outside is not None:
        raise ApiError(
            f"{param}: token id {outside} is outside the vocabulary of {vocabulary:,}",
            param=param,
        )


def check_length(model: ServedModel, num_characters: int, param: str) -> None:
    """Raise ``ApiError`` if the tokens of so many characters can only be too many: it takes
    seconds to compute those of some megabytes."""
    if num_characters > model.most_characters:
        raise too_long(model, f"{num_characters:,} characters", param)


def too_long(model: ServedModel, size: str, param: str) -> ApiError:
    """The error of a prompt that fills the context."""
    return ApiError(
        f"the prompt has {size}, and the context length is {model.longest:,} tokens, "
        "which leaves no room for a response; shorten the prompt",
        param=param,
        code="context_length_exceeded",
    )


def _ids(model: ServedModel, given: Given) -> list[list[int]]:
    if isinstance(given, str):
        return [_continued(model, given)]
    if given and all(isinstance(one, int) for one in given):
        return [[one for one in given if isinstance(one, int)]]
    return [_continued(model, one) if isinstance(one, str) else _as_ids(one) for one in given]


def _as_ids(value: object) -> list[int]:
    return [one for one in value if isinstance(one, int)] if isinstance(value, list) else []


def _continued(model: ServedModel, text: str) -> list[int]:
    """The ids of a text. If it begins with the first token that the tokenizer adds, it has it
    once."""
    ids = model.opened.continuation(text)
    first = model.opened.tokenizer.bos_token_id
    return ids[1:] if first is not None and ids[:2] == [first, first] else ids
