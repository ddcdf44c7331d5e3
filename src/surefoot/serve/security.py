"""Who may use the server: this machine, or whoever has the key; and how much may be sent.

The Host of a request must be a name of this machine or one that was given at the start, so that no
page of another site reaches the server under a name of its own.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..board.host_names import Hosts
from ..board.security import LimitedBody
from .errors import ApiError

_OPEN = ("/health",)  # for whoever watches over the server


@dataclass(frozen=True)
class ApiGuard:
    """Refuses requests without permission, before any other code runs."""

    app: ASGIApp
    api_key: str | None
    hosts: Hosts
    max_body: int
    note: Callable[[str, int], None]  # gets the address and the status of each request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer or refuse one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        noted = self._noting(scope, send)
        refused = self._refusal(scope)
        if refused is not None:
            await refused.response(scope, receive, noted)
            return
        await self.app(scope, LimitedBody(receive, self.max_body), noted)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        if why := self.hosts.refusal(headers.getlist("host"), "server"):
            return ApiError(why, status=421)
        length = headers.get("content-length", "0")
        if not (length.isascii() and length.isdigit()):
            return ApiError("content-length: expected digits")
        if int(length) > self.max_body:
            return ApiError(f"the request has more than {self.max_body:,} bytes", status=413)
        if self.api_key is None or scope["path"] in _OPEN:
            return None
        given = headers.get("authorization", "").removeprefix("Bearer ")
        if hmac.compare_digest(given.encode(), self.api_key.encode()):
            return None
        return ApiError(
            "expected the header 'Authorization: Bearer KEY' with the key of this server",
            status=401,
            code="invalid_api_key",
        )

    def _noting(self, scope: Scope, send: Send) -> Send:
        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = scope.get("route")
                path = getattr(route, "path", "other")
                self.note(path, message["status"])
            await send(message)

        return sending
