"""``/v1/completions``: texts, or token ids, that are continued."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Literal

from pydantic import Field

from ...generate.live import Token
from .body import WITHOUT_EFFECT, Prompts
from .errors import ApiError
from .prompts import each_prompt, plain_prompts
from .responses import Choice, ServedResponses
from .sampling import Reported, SamplingBody, rows_for
from .server_state import ServerState
from .token_report import completion_logprobs

MAX_ALTERNATIVES = 20
_USUAL = 16  # tokens of a response, as OpenAI documents


class CompletionBody(SamplingBody):
    """Texts or lists of token ids, and how each is continued."""

    prompt: Prompts
    max_tokens: int | None = Field(default=None, ge=1)
    logprobs: int | None = Field(default=None, ge=0, le=MAX_ALTERNATIVES)
    return_tokens_as_token_ids: bool | None = None
    best_of: int | None = Field(default=None, ge=1)
    echo: Literal[False] | None = Field(default=None, description=WITHOUT_EFFECT)
    suffix: Literal[""] | None = Field(default=None, description=WITHOUT_EFFECT)


@dataclass(eq=False)
class Completion(ServedResponses[CompletionBody]):
    """One request, and where the texts of its responses have come to."""

    offsets: dict[int, int] = field(default_factory=dict)  # of rows that have begun

    prefix, kind, kind_of_chunk = "cmpl", "text_completion", "text_completion"

    def first(self) -> list[Choice]:
        """A stream begins with the first token."""
        return []

    def parts(self, place: int, token: Token) -> list[Choice]:
        """A token, if it has text or is reported."""
        body, is_first = self.body, place not in self.offsets
        offset = self.offsets.setdefault(place, 0)
        reports = body.logprobs is not None or body.return_token_ids
        if not (reports or token.text or token.finish_reason):
            return []
        reason = token.finish_reason and ("stop" if token.finish_reason == "stop" else "length")
        choice: Choice = {"index": place, "text": token.text, "logprobs": None}
        choice["finish_reason"] = reason
        if body.logprobs is not None:
            as_ids = bool(body.return_tokens_as_token_ids)
            report, self.offsets[place] = completion_logprobs(
                self.model, token, offset, as_ids=as_ids
            )
            choice["logprobs"] = report
        if body.return_token_ids:
            prompt = self.prompts[place // (body.n or 1)]
            choice["token_ids"] = [token.id]
            choice["prompt_token_ids"] = list(prompt) if is_first else None
        return [choice]

    def whole(self, place: int, joined: Choice) -> Choice:
        """All tokens."""
        return joined


async def prepared(state: ServerState, body: CompletionBody) -> Completion:
    """Continue a text, or token ids."""
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise ApiError("best_of: expected the value of n; all responses are given", param="best_of")
    state.check_room(len(each_prompt(body.prompt)) * (body.n or 1))
    model = await state.models.get(body.model)
    prompts = await asyncio.to_thread(plain_prompts, model, body.prompt)
    decode = model.plainly if body.skip_special_tokens else model.exactly
    reported = Reported(body.logprobs, decode, "prompt")
    most = body.max_tokens or _USUAL
    rows = await asyncio.to_thread(rows_for, state.engine, model, body, prompts, most, reported)
    return Completion(model, body, prompts, rows)
