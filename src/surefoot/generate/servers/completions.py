"""OpenAI's ``/v1/completions`` with token ids: prompts are lists of ids, and each choice has
``token_ids`` (vLLM's ``return_token_ids``) or tokens of the form ``token_id:17``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import RunError
from .http import exchange_json, short
from .server import SamplingRequest, ServerResponse

_ID = "token_id:"


def complete(
    url: str, model: str, request: SamplingRequest, seconds: float
) -> list[ServerResponse]:
    """The responses to ``request`` by a model of the server at ``url``. Raises ``RunError``."""
    address = f"{url}/v1/completions"
    found = exchange_json(address, _body(model, request), seconds)
    choices = found.get("choices") if isinstance(found, Mapping) else None
    if not isinstance(choices, list) or not all(isinstance(one, Mapping) for one in choices):
        raise RunError(f"{address}: expected a list of choices, got {short(str(found))}")
    return [_response(choice, found.get("model")) for choice in choices]


def _body(model: str, request: SamplingRequest) -> dict[str, object]:
    """Every setting by which a server could take defaults of the model's own is sent."""
    return {
        "model": model,
        "prompt": list(request.prompt),
        "n": request.count,
        "max_tokens": request.max_new_tokens,
        "temperature": request.temperature,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logprobs": 0,  # of the sampled tokens alone
        "stop_token_ids": list(request.stops),
        "skip_special_tokens": False,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }


def _response(choice: Mapping[str, Any], model: object) -> ServerResponse:
    logprobs = choice.get("logprobs")
    logprobs = logprobs if isinstance(logprobs, Mapping) else {}
    ids = choice.get("token_ids")
    if ids is None:
        ids = _ids_of(logprobs.get("tokens"))
    reason = choice.get("finish_reason")
    return ServerResponse(ids, logprobs.get("token_logprobs"), reason, model)


def _ids_of(tokens: object) -> Sequence[int] | None:
    """The ids of tokens that are written as such."""
    if not isinstance(tokens, list) or not tokens:
        return None
    texts = [str(token).removeprefix(_ID) for token in tokens]
    is_written = all(str(token).startswith(_ID) for token in tokens)
    return [int(text) for text in texts] if is_written and all(map(str.isdigit, texts)) else None
