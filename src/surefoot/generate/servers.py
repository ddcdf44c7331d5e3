"""Where responses are sampled: the engine of ``generate``, or a server that takes and gives
token ids and samples with the weights of now (vLLM, SGLang, any with OpenAI's completions), by
their documented endpoints. What a server gives is checked: nothing that could be trained on
silently wrong is taken."""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import math
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

from ..errors import RunError, counted
from ..log import announced
from ..schema import must
from ..storage.remote import is_loopback
from .section import FinishReason, Ids, Sample


@dataclass(frozen=True)
class ServedWeights:
    """Weights in a folder that a server reads, as Hugging Face's or PEFT's files."""

    folder: Path
    name: str  # by which requests name them
    is_adapter: bool
    is_named: bool = True  # whether responses must name them, too, if they name any


@dataclass(frozen=True)
class SamplingRequest:
    """Some responses to one prompt, sampled from the whole distribution at a temperature."""

    prompt: Ids
    count: int
    max_new_tokens: int
    temperature: float
    stops: Sequence[int]


@dataclass(frozen=True)
class ServerResponse:
    """One response as a server gave it; nothing in it has been checked."""

    ids: object
    logps: object
    finish_reason: object
    weights: object = None  # their name, if the server gives it


class SamplingServer(Protocol):
    """A program that samples. Its fields are its settings in the recipe."""

    url: str
    timeout: float
    concurrency: int

    @property
    def on_other_temperature(self) -> str:
        """What to do if its log-probabilities are of another temperature."""

    def load(self, weights: ServedWeights, before: ServedWeights | None) -> ServedWeights:
        """Make the server read ``weights``, in place of those ``before``; with the name that
        requests give. Raises ``RunError``."""

    def sample(self, request: SamplingRequest, weights: ServedWeights) -> list[ServerResponse]:
        """The responses. Raises ``RunError``."""


class Sampler(Protocol):
    """Where responses are sampled."""

    @property
    def server(self) -> SamplingServer | None:
        """The server; None: they are sampled by the process that trains."""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Surefoot's own engine, in the process that trains."""

    server = None


logger = logging.getLogger(__name__)
S = TypeVar("S", bound="_Address")


@dataclass(frozen=True, kw_only=True)
class _Address:
    """Where a server is, and how long it may take."""

    url: str
    """Its address, such as ``http://localhost:8000``."""
    timeout: float = 600.0
    """Seconds that it may take for the responses to one prompt, or to load weights."""
    concurrency: int = 64
    """Prompts that are sent to it at a time."""

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url must begin with http:// or https://, got {self.url!r}")
        must(self, "be positive", "timeout")
        must(self, "be at least 1", "concurrency")

    @property
    def server(self: S) -> S:
        """Itself."""
        return self

    @property
    def _root(self) -> str:
        return self.url.rstrip("/").removesuffix("/v1")

    def _post(self, path: str, body: Mapping[str, object]) -> str:
        return exchange(self._root + path, body, self.timeout)

    def _unload(self, path: str, adapter: ServedWeights | None) -> None:
        """Drop an adapter. A server that was started again does not have it, which is no error."""
        if adapter is None:
            return
        try:
            self._post(path, {"lora_name": adapter.name})
        except RunError as error:
            logger.info("the former adapter is not unloaded: %s", error)


@dataclass(frozen=True, kw_only=True)
class VLLM(_Address):
    """A vLLM server (``vllm serve``). Adapters need ``--enable-lora`` and
    ``VLLM_ALLOW_RUNTIME_LORA_UPDATING=True``, other weights ``VLLM_SERVER_DEV_MODE=1``; with a
    temperature other than 1, ``--logprobs-mode processed_logprobs``.
    """

    model: str | None = None
    """The name under which it serves the model. Unset: the first of ``/v1/models``."""

    @property
    def on_other_temperature(self) -> str:
        """A server option."""
        return "start vLLM with --logprobs-mode processed_logprobs"

    def load(self, weights: ServedWeights, before: ServedWeights | None) -> ServedWeights:
        """Load an adapter under a new name, or the model from its folder."""
        folder = str(weights.folder)
        if weights.is_adapter:
            adapter = {"lora_name": weights.name, "lora_path": folder}
            self._post("/v1/load_lora_adapter", adapter)
            self._unload("/v1/unload_lora_adapter", before)
            return weights
        body = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        self._post("/collective_rpc", body)
        self._post("/reset_prefix_cache", {})  # of the former weights
        name = self.model or first_model(self._root, self.timeout)
        return replace(weights, name=name, is_named=False)

    def sample(self, request: SamplingRequest, weights: ServedWeights) -> list[ServerResponse]:
        """Through ``/v1/completions``."""
        return complete(self._root, weights.name, request, self.timeout)


@dataclass(frozen=True, kw_only=True)
class SGLang(_Address):
    """An SGLang server (``python -m sglang.launch_server``). Adapters need ``--enable-lora`` with
    ``--max-lora-rank`` and ``--lora-target-modules``.
    """

    @property
    def on_other_temperature(self) -> str:
        """An environment variable."""
        return "start SGLang without SGLANG_RETURN_ORIGINAL_LOGPROB"

    def load(self, weights: ServedWeights, before: ServedWeights | None) -> ServedWeights:
        """Load an adapter under a new name, or the model from its folder, with its version."""
        folder = str(weights.folder)
        if weights.is_adapter:
            adapter = {"lora_name": weights.name, "lora_path": folder}
            self._change("/load_lora_adapter", adapter)
            self._unload("/unload_lora_adapter", before)
            return weights
        body = {"model_path": folder, "weight_version": weights.name, "flush_cache": True}
        self._change("/update_weights_from_disk", body)
        return weights

    def _change(self, path: str, body: Mapping[str, object]) -> None:
        """Post ``body``, and expect success."""
        address = self._root + path
        answer = exchange_json(address, body, self.timeout)
        if not isinstance(answer, Mapping) or answer.get("success") is not True:
            raise RunError(f"{address}: expected success, got {short(str(answer))}")

    def sample(self, request: SamplingRequest, weights: ServedWeights) -> list[ServerResponse]:
        """Through ``/generate``."""
        address = f"{self._root}/generate"
        answer = exchange_json(address, _generate_body(request, weights), self.timeout)
        is_list = isinstance(answer, list)
        if not is_list or not all(isinstance(response, Mapping) for response in answer):
            raise RunError(f"{address}: expected a list of responses, got {short(str(answer))}")
        return [_generated(response, is_adapter=weights.is_adapter) for response in answer]


@dataclass(frozen=True, kw_only=True)
class OpenAICompletions(_Address):
    """Any server with OpenAI's ``/v1/completions`` that takes prompts as token ids and gives
    ``token_ids`` and log-probabilities. A program beside it loads weights.
    """

    update_url: str
    """Gets ``{"path": FOLDER, "name": NAME, "kind": "full" or "adapter"}`` by POST after each
    update, and answers once the server has these weights; with ``{"model": ...}``, requests name
    that model from then on.
    """
    model: str | None = None
    """The model that requests name. Unset: the first of ``/v1/models``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.update_url.startswith(("http://", "https://")):
            raise ValueError(
                f"update_url must begin with http:// or https://, got {self.update_url!r}"
            )

    @property
    def on_other_temperature(self) -> str:
        """Whatever it is there."""
        return "make the server give log-probabilities after the temperature"

    def load(self, weights: ServedWeights, before: ServedWeights | None) -> ServedWeights:
        """Ask the program at ``update_url``."""
        kind = "adapter" if weights.is_adapter else "full"
        body = {"path": str(weights.folder), "name": weights.name, "kind": kind}
        answer = exchange_json(self.update_url, body, self.timeout)
        name = answer.get("model") if isinstance(answer, Mapping) else None
        if isinstance(name, str):
            return replace(weights, name=name)
        name = self.model or first_model(self._root, self.timeout)
        return replace(weights, name=name, is_named=False)

    def sample(self, request: SamplingRequest, weights: ServedWeights) -> list[ServerResponse]:
        """Through ``/v1/completions``."""
        return complete(self._root, weights.name, request, self.timeout)


def first_model(root: str, seconds: float) -> str:
    """The first model that a server names. Raises ``RunError``."""
    address = f"{root}/v1/models"
    answer = exchange_json(address, None, seconds)
    try:
        return str(answer["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise RunError(f"{address}: expected a list of models, got {short(str(answer))}") from None


def _generate_body(request: SamplingRequest, weights: ServedWeights) -> dict[str, object]:
    """The prompt as often as it has responses: SGLang computes equal prefixes once."""
    body: dict[str, object] = {
        "input_ids": [list(request.prompt)] * request.count,
        "sampling_params": {
            "max_new_tokens": request.max_new_tokens,
            "temperature": request.temperature,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "stop_token_ids": list(request.stops),
            "skip_special_tokens": False,
        },
        "return_logprob": True,
    }
    return {**body, "lora_path": weights.name} if weights.is_adapter else body


def _generated(answer: Mapping[str, Any], *, is_adapter: bool) -> ServerResponse:
    """One response: each entry of ``output_token_logprobs`` begins with log-probability and id."""
    meta = answer.get("meta_info")
    meta = meta if isinstance(meta, Mapping) else {}
    entries, reason = meta.get("output_token_logprobs"), meta.get("finish_reason")
    if not isinstance(entries, list) or not all(
        isinstance(e, list) and len(e) > 1 for e in entries
    ):
        entries = None
    ids = answer.get("output_ids") if entries is None else [entry[1] for entry in entries]
    logps = None if entries is None else [entry[0] for entry in entries]
    if isinstance(reason, Mapping):
        reason = reason.get("type")
    # the version is that of the base, which an adapter does not change
    return ServerResponse(ids, logps, reason, None if is_adapter else meta.get("weight_version"))


_ID = "token_id:"


def complete(
    url: str, model: str, request: SamplingRequest, seconds: float
) -> list[ServerResponse]:
    """The responses to ``request`` by a model of the server at ``url``. Raises ``RunError``."""
    address = f"{url}/v1/completions"
    answer = exchange_json(address, _body(model, request), seconds)
    choices = answer.get("choices") if isinstance(answer, Mapping) else None
    if not isinstance(choices, list) or not all(isinstance(choice, Mapping) for choice in choices):
        raise RunError(f"{address}: expected a list of choices, got {short(str(answer))}")
    return [_response(choice, answer.get("model")) for choice in choices]


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


_LONGEST = 300  # characters of an answer in a message


def exchange(url: str, body: Mapping[str, object] | None, seconds: float) -> str:
    """The answer to a POST of ``body``, or to a GET. Raises ``RunError``."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    is_question = body is None  # which a server that is up answers at once
    wait = announced("%s, for up to %g s (timeout)", url, seconds)
    try:
        with (
            wait if is_question else contextlib.nullcontext(),
            _opener(url).open(request, timeout=seconds) as answer,
        ):
            return str(answer.read().decode(errors="replace"))
    except urllib.error.HTTPError as error:
        message = short(error.read().decode(errors="replace"))
        raise RunError(f"{url}: answered {error.code}: {message}{_proxy(url)}") from None
    except urllib.error.URLError as error:
        raise RunError(f"{url}: {error.reason}{_proxy(url)}") from None
    except (OSError, http.client.HTTPException) as error:
        raise RunError(f"{url}: {type(error).__name__}: {error}") from None


def _opener(url: str) -> urllib.request.OpenerDirector:
    """A server of this machine is reached directly: no proxy could reach it."""
    is_here = is_loopback(urlsplit(url).hostname or "")
    return urllib.request.build_opener(*[urllib.request.ProxyHandler({})] * is_here)


def _proxy(url: str) -> str:
    """For a message: the proxy on the way, if any. What it refuses, the server never saw."""
    scheme, host = urlsplit(url).scheme, urlsplit(url).hostname or ""
    proxy = urllib.request.getproxies().get(scheme)
    if not proxy or is_loopback(host) or urllib.request.proxy_bypass(host):
        return ""
    shown = proxy.rpartition("@")[2]  # without a password
    return f" (through the proxy {shown} of {scheme.upper()}_PROXY; NO_PROXY={host} avoids it)"


def exchange_json(url: str, body: Mapping[str, object] | None, seconds: float) -> Any:
    """The same, parsed."""
    text = exchange(url, body, seconds)
    try:
        return json.loads(text)
    except ValueError:
        raise RunError(f"{url}: expected JSON, got {short(text)}") from None


def short(text: str) -> str:
    """An answer, for messages."""
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


# What a server says is trained on: a mistake of it would be silent, so each answer is checked
# before it is a sample (decisions/0057).
_ROUNDING = 1e-3  # nats by which a log-probability may be above 0


@dataclass(frozen=True)
class Expected:
    """What responses to a request must be."""

    url: str
    request: SamplingRequest
    weights: ServedWeights
    vocabulary: int  # of the policy
    version: int | None  # optimizer steps behind the weights
    out_of_tokens: FinishReason  # of a response with all tokens that were requested

    def samples(self, responses: Sequence[ServerResponse]) -> list[Sample]:
        """The responses, checked. Raises ``RunError``."""
        if len(responses) != self.request.count:
            num_responses = counted(len(responses), "response")
            raise self._error(f"gave {num_responses} where {self.request.count} were requested")
        return [self._sample(response) for response in responses]

    def _sample(self, response: ServerResponse) -> Sample:
        weights, served = self.weights, response.weights
        if weights.is_named and served is not None and served != weights.name:
            raise self._error(
                f"sampled with weights {served!r} where {weights.name!r} were "
                "requested: another program has changed them, or the server was started again"
            )
        ids = self._ids(response.ids)
        logps = self._logps(response.logps, len(ids))
        return Sample(ids, logps, self._reason(response.finish_reason, ids), version=self.version)

    def _ids(self, ids: object) -> tuple[int, ...]:
        # a bool is an int, too
        if not isinstance(ids, list) or not ids or not all(type(token) is int for token in ids):
            raise self._error(
                "gave no token ids of a response; it needs to support them, as vLLM does with "
                "return_token_ids and SGLang in /generate"
            )
        max_tokens, stops = self.request.max_new_tokens, self.request.stops
        if len(ids) > max_tokens:
            num_tokens = counted(len(ids), "token")
            raise self._error(f"gave {num_tokens} where at most {max_tokens} were requested")
        outside = next((token for token in ids if not 0 <= token < self.vocabulary), None)
        if outside is not None:
            raise self._error(
                f"gave token id {outside}, outside the vocabulary of {self.vocabulary}: it serves "
                "another model"
            )
        if any(token in stops for token in ids[:-1]):
            raise self._error("continued after a token that ends a response")
        return tuple(ids)

    def _logps(self, logps: object, count: int) -> tuple[float, ...]:
        logps = logps if isinstance(logps, list) else []
        if not logps or not all(type(logp) in (int, float) for logp in logps):
            raise self._error("gave no log-probabilities of the sampled tokens")
        if len(logps) != count:
            num_logps = counted(len(logps), "log-probability", "log-probabilities")
            raise self._error(f"gave {num_logps} of {counted(count, 'token')}")
        wrong = next((x for x in logps if not math.isfinite(x) or x > _ROUNDING), None)
        if wrong is not None:
            raise self._error(f"gave {wrong} as a log-probability")
        return tuple(map(float, logps))

    def _reason(self, reason: object, ids: Sequence[int]) -> FinishReason:
        if ids[-1] in self.request.stops:
            return "stop"
        if reason == "stop":
            raise self._error(
                f"ended a response with token {ids[-1]}, which is no token that ends one here "
                f"({', '.join(map(str, self.request.stops))}): its model has other end tokens, or "
                "it cuts them off"
            )
        if reason != "length":
            raise self._error(f"did not complete a response (finish_reason {reason!r})")
        is_full = len(ids) == self.request.max_new_tokens
        return self.out_of_tokens if is_full else "context"

    def _error(self, problem: str) -> RunError:
        return RunError(f"{self.url}: {problem}")


# To add a server: write its dataclass above, and its line here.
SAMPLERS: Mapping[str, type] = {
    "engine": Engine,
    "vllm": VLLM,
    "sglang": SGLang,
    "openai": OpenAICompletions,
}
