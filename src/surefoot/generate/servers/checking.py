"""Responses of a server to samples: nothing that could be trained on silently wrong is taken."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import RunError, counted
from ..samples import FinishReason, Sample
from .server import SamplingRequest, ServedWeights, ServerResponse

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

    def samples(self, found: Sequence[ServerResponse]) -> list[Sample]:
        """The responses, checked. Raises ``RunError``."""
        if len(found) != self.request.count:
            said = f"gave {counted(len(found), 'response')} where {self.request.count} were"
            raise self._error(f"{said} requested")
        return [self._sample(one) for one in found]

    def _sample(self, found: ServerResponse) -> Sample:
        weights, said = self.weights, found.weights
        if weights.is_named and said is not None and said != weights.name:
            raise self._error(
                f"sampled with weights {said!r} where {weights.name!r} were "
                "requested: another program has changed them, or the server was started again"
            )
        ids = self._ids(found.ids)
        logps = self._logps(found.logps, len(ids))
        return Sample(ids, logps, self._reason(found.finish_reason, ids), version=self.version)

    def _ids(self, found: object) -> tuple[int, ...]:
        if not isinstance(found, list) or not found or not all(type(one) is int for one in found):
            raise self._error(
                "gave no token ids of a response; it needs to support them, as vLLM does with "
                "return_token_ids and SGLang in /generate"
            )
        most, stops = self.request.max_new_tokens, self.request.stops
        if len(found) > most:
            said = f"gave {counted(len(found), 'token')} where at most {most} were requested"
            raise self._error(said)
        outside = next((one for one in found if not 0 <= one < self.vocabulary), None)
        if outside is not None:
            raise self._error(
                f"gave token id {outside}, outside the vocabulary of {self.vocabulary}: it serves "
                "another model"
            )
        if any(one in stops for one in found[:-1]):
            raise self._error("continued after a token that ends a response")
        return tuple(found)

    def _logps(self, found: object, count: int) -> tuple[float, ...]:
        values = found if isinstance(found, list) else []
        if not values or not all(type(one) in (int, float) for one in values):
            raise self._error("gave no log-probabilities of the sampled tokens")
        if len(values) != count:
            said = f"gave {counted(len(values), 'log-probability', 'log-probabilities')}"
            raise self._error(f"{said} of {counted(count, 'token')}")
        wrong = next((x for x in values if not math.isfinite(x) or x > _ROUNDING), None)
        if wrong is not None:
            raise self._error(f"gave {wrong} as a log-probability")
        return tuple(map(float, values))

    def _reason(self, found: object, ids: Sequence[int]) -> FinishReason:
        if ids[-1] in self.request.stops:
            return "stop"
        if found == "stop":
            raise self._error(
                f"ended a response with token {ids[-1]}, which is no token that ends one here "
                f"({', '.join(map(str, self.request.stops))}): its model has other end tokens, or "
                "it cuts them off"
            )
        if found != "length":
            raise self._error(f"did not complete a response (finish_reason {found!r})")
        is_full = len(ids) == self.request.max_new_tokens
        return self.out_of_tokens if is_full else "context"

    def _error(self, said: str) -> RunError:
        return RunError(f"{self.url}: {said}")
