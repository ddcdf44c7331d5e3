"""The servers, by their documented endpoints: vLLM, SGLang, and any with OpenAI's completions."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ...errors import RunError
from ...schema import must
from .completions import complete
from .http import exchange, exchange_json, short
from .server import SamplingRequest, ServedWeights, ServerResponse

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
        found = exchange_json(address, body, self.timeout)
        if not isinstance(found, Mapping) or found.get("success") is not True:
            raise RunError(f"{address}: expected success, got {short(str(found))}")

    def sample(self, request: SamplingRequest, weights: ServedWeights) -> list[ServerResponse]:
        """Through ``/generate``."""
        address = f"{self._root}/generate"
        found = exchange_json(address, _generate_body(request, weights), self.timeout)
        if not isinstance(found, list) or not all(isinstance(one, Mapping) for one in found):
            raise RunError(f"{address}: expected a list of responses, got {short(str(found))}")
        return [_generated(one, is_adapter=weights.is_adapter) for one in found]


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
        found = exchange_json(self.update_url, body, self.timeout)
        name = found.get("model") if isinstance(found, Mapping) else None
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
    found = exchange_json(address, None, seconds)
    try:
        return str(found["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise RunError(f"{address}: expected a list of models, got {short(str(found))}") from None


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


def _generated(found: Mapping[str, Any], *, is_adapter: bool) -> ServerResponse:
    """One response: each entry of ``output_token_logprobs`` begins with log-probability and id."""
    meta = found.get("meta_info")
    meta = meta if isinstance(meta, Mapping) else {}
    entries, reason = meta.get("output_token_logprobs"), meta.get("finish_reason")
    if not isinstance(entries, list) or not all(
        isinstance(e, list) and len(e) > 1 for e in entries
    ):
        entries = None
    ids = found.get("output_ids") if entries is None else [entry[1] for entry in entries]
    logps = None if entries is None else [entry[0] for entry in entries]
    if isinstance(reason, Mapping):
        reason = reason.get("type")
    # the version is that of the base, which an adapter does not change
    return ServerResponse(ids, logps, reason, None if is_adapter else meta.get("weight_version"))
