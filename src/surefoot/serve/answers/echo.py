"""``echo``: a completion that begins with its prompt, and with what the model thinks of it.

A prompt is computed alone, in one pass, so its log-probabilities have the same bits whatever else
is answered. They are of the model's distribution. The first token follows nothing and has none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ...generate.decode import Decode
from ...generate.live import Token
from ..errors import ApiError
from ..running.models import ServedModel
from ..server_state import ServerState
from .prompt_ids import Given
from .token_report import completion_logprobs, name_of

_MOST = 4 << 30  # bytes of the logits of a prompt


class EchoedBody(Protocol):
    """What a request says of its prompts."""

    prompt: Given
    logprobs: int | None
    return_tokens_as_token_ids: bool | None


@dataclass(frozen=True)
class Echo:
    """What a response says of its prompt."""

    text: str
    logprobs: Mapping[str, list[object]]  # by the names of a completion's; {}: none are wanted
    end: int = 0  # where the text after it begins

    def before(self, report: Mapping[str, list[object]]) -> dict[str, list[object]]:
        """``logprobs`` of the prompt and of the response."""
        return {name: [*self.logprobs[name], *values] for name, values in report.items()}


async def echoes_of(
    state: ServerState,
    model: ServedModel,
    body: EchoedBody,
    prompts: Sequence[Sequence[int]],
    decode: Decode,
) -> list[Echo]:
    """What responses say of each of ``prompts``. Raises ``ApiError``: one is too long."""
    given = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    texts = [one if isinstance(one, str) else None for one in given]
    if len(texts) != len(prompts):  # token ids of one prompt
        texts = [None]
    found = []
    for text, prompt in zip(texts, prompts, strict=True):
        said = await asyncio.to_thread(decode, prompt) if text is None else text
        found.append(Echo(said, {}))
        if body.logprobs is not None:
            tokens = await _tokens(state, model, prompt, body.logprobs)
            as_ids = bool(body.return_tokens_as_token_ids)
            found[-1] = await asyncio.to_thread(_with_logprobs, model, said, tokens, as_ids=as_ids)
    return found


def _with_logprobs(model: ServedModel, text: str, tokens: Sequence[Token], *, as_ids: bool) -> Echo:
    first = tokens[0].id
    report, end = completion_logprobs(model, tokens[1:], len(model.exactly([first])), as_ids=as_ids)
    of_first = {"tokens": name_of(model, first, as_ids=as_ids), "text_offset": 0}
    found = {name: [of_first.get(name), *values] for name, values in report.items()}
    return Echo(text, found, end)


async def _tokens(
    state: ServerState, model: ServedModel, prompt: Sequence[int], num_alternatives: int
) -> list[Token]:
    """The tokens of a prompt, each with its log-probability after those before it."""
    size = len(prompt) * model.vocabulary * 4
    if size > _MOST:
        raise ApiError(
            f"echo: the log-probabilities of {len(prompt):,} tokens take {size / 2**30:.1f} GiB, "
            f"more than {_MOST >> 30}; send shorter prompts, or no logprobs",
            param="echo",
        )
    return await state.compute(model, lambda: _computed(model, prompt, num_alternatives))


@torch.no_grad()
def _computed(model: ServedModel, prompt: Sequence[int], num_alternatives: int) -> list[Token]:
    inner = model.opened.inner
    ids = torch.tensor([list(prompt)], device=inner.device)
    logits_TV = inner(input_ids=ids, use_cache=False).logits[0, :-1].float()
    logps_TV = logits_TV.log_softmax(-1)
    own_T = logps_TV.gather(-1, ids[0, 1:, None])[:, 0].tolist()
    top = logps_TV.topk(min(num_alternatives, logps_TV.shape[-1]))
    found = [Token(0, prompt[0], "", None)]
    for token, logp, others, values in zip(
        prompt[1:], own_T, top.indices.tolist(), top.values.tolist(), strict=True
    ):
        found.append(Token(0, token, "", None, logp, list(zip(others, values, strict=True))))
    return found
