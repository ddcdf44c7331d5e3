"""Who may ask the board: this machine's user, or whoever has the token; no page of another site.

Against DNS rebinding, the Host of a request must be the board's own, also where there is a token.
Against requests that other pages send, anything but reading needs the board's own Origin and a
header that forms cannot set.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...storage.web import Hosts, LimitedBody

MAX_BODY = 1 << 20
COOKIE = "surefoot_token"
HEADER = "x-surefoot"
_READING = ("GET", "HEAD")
_HARMLESS = ("/api/check", "/api/edit")  # they answer about a text, and write and start nothing
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'none'; frame-ancestors 'none'; base-uri 'none'"
)
_HEADERS = [
    (b"content-security-policy", _POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
]


@dataclass(frozen=True)
class Guard:
    """Refuses what is not meant for the board, before any of its code runs."""

    app: ASGIApp
    token: str | None = None  # needed where others reach the address
    hosts: Hosts = field(default_factory=Hosts)
    is_read_only: bool = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer or refuse one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        answering = self._refusal(scope) or self.app
        await answering(scope, LimitedBody(receive, MAX_BODY), _with_headers(send))

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if why := self.hosts.refusal(headers.getlist("host"), "board"):
            return _refused(421, why)
        is_of_page = not scope["path"].startswith("/api/") or _is_from_here(headers)
        if not is_of_page or (scope["method"] not in _READING and not _is_own(headers, host)):
            return _refused(403, "this request comes from another page")
        if self.is_read_only and scope["method"] not in _READING and scope["path"] not in _HARMLESS:
            return _refused(403, "this board is read-only: it was started with --read-only")
        if wrong := _size_problem(headers):
            return wrong
        return None if self.token is None else self._unknown(scope, headers)

    def _unknown(self, scope: Scope, headers: Headers) -> Response | None:
        """The way in by ``?token=``, or None if the token is there."""
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if self._is_token(given) and scope["method"] == "GET":
            entrance = RedirectResponse("/", 303)
            entrance.set_cookie(COOKIE, given, httponly=True, samesite="strict", path="/")
            return entrance
        bearer = headers.get("authorization", "").removeprefix("Bearer ")
        if self._is_token(_cookie(headers)) or self._is_token(bearer):
            return None
        return _refused(401, "open the address with ?token=… that `surefoot board` has printed")

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), (self.token or "").encode())


def _size_problem(headers: Headers) -> Response | None:
    length = headers.get("content-length", "0")
    if not length.isdigit():
        return _refused(400, "content-length: expected digits")
    return _refused(413, f"more than {MAX_BODY:,} bytes") if int(length) > MAX_BODY else None


def _is_own(headers: Headers, host: str) -> bool:
    """Whether a request that changes something comes from the board's page, or from no page."""
    origin = headers.get("origin")
    if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
        return False
    return _is_from_here(headers) and headers.get(HEADER) == "1"


def _is_from_here(headers: Headers) -> bool:
    """Whether no page of another site has sent a request, as browsers say it."""
    return headers.get("sec-fetch-site", "same-origin") in ("same-origin", "none")


def _cookie(headers: Headers) -> str:
    try:
        found = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return ""
    return found.value if found else ""


def _refused(status: int, why: str) -> Response:
    return PlainTextResponse(f"{why}\n", status)


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            known: Iterable[tuple[bytes, bytes]] = message.get("headers", [])
            message = {**message, "headers": [*known, *_HEADERS]}
        await send(message)

    return sending
