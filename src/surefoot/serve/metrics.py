"""Figures of the server for Prometheus."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics:
    """Counters of one server."""

    def __init__(self) -> None:
        self._registry = own = CollectorRegistry()
        self.requests = Counter(
            "surefoot_requests", "Requests by address and status", ["path", "status"], registry=own
        )
        self.prompt_tokens = Counter("surefoot_prompt_tokens", "Tokens of prompts", registry=own)
        self.tokens = Counter("surefoot_generated_tokens", "Tokens of responses", registry=own)
        self.refused = Counter(
            "surefoot_refused_requests", "Requests for which there was no room", registry=own
        )
        self.first_token = Histogram(
            "surefoot_time_to_first_token_seconds",
            "From a request to its first token",
            buckets=_SECONDS,
            registry=own,
        )
        self.seconds = Histogram(
            "surefoot_response_seconds",
            "From a request to the last token of a response",
            buckets=_SECONDS,
            registry=own,
        )

    def watch(self, name: str, text: str, read: Callable[[], float]) -> None:
        """A value that is read at each scrape."""
        Gauge(name, text, registry=self._registry).set_function(read)

    def text(self) -> bytes:
        """All of them in Prometheus' format."""
        return generate_latest(self._registry)
