"""The server of the board: pages, API, and the guard in front of them.

Who may ask: this machine's user, or whoever has the token; no page of another site. Against DNS
rebinding, the Host of a request must be the board's own, also where there is a token. Against
requests that other pages send, anything but reading needs the board's own Origin and a header that
forms cannot set.
"""

from __future__ import annotations

import hmac
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...errors import SurefootError
from ...storage.web import Hosts, LimitedBody
from ...terminal_text import plain
from . import api, recipes
from .board import Board
from .run_folders import OutsideRootError

STATIC = Path(__file__).parent / "static"
MAX_BODY = 1 << 20
MAX_REQUESTS = 600  # of all who have the token, in the time below
_WINDOW = 10.0  # seconds
COOKIE = "surefoot_token"
HEADER = "x-surefoot"
_HARMLESS = ("/api/check", "/api/edit")  # they answer about a text, and write and start nothing
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'none'; frame-ancestors 'none'; base-uri 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


def create_app(
    root: Path,
    token: str | None = None,
    *,
    hosts: Hosts | None = None,
    is_read_only: bool = False,
    folders: Sequence[Path] = (),
) -> ASGIApp:
    """The board of the runs below ``root``, reached under the names in ``hosts``: by default this
    machine's own address. With a ``token``, nothing is shown without it. With one, or with
    ``folders``, recipes name only files of ``root`` and of these folders."""
    board = Board(root.resolve(), is_read_only=is_read_only)
    if token is not None or folders:
        board.folders = [path.resolve() for path in folders]

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await board.close()

    app = FastAPI(lifespan=lifespan, openapi_url=None, docs_url=None, redoc_url=None)
    app.state.board = board
    for part in (api, recipes):
        app.include_router(part.routes)
    for kind in (SurefootError, OSError, RequestValidationError):
        app.add_exception_handler(kind, _explained)

    @app.get("/")
    def page() -> FileResponse:
        return FileResponse(STATIC / "index.html", headers={"Cache-Control": "no-cache"})

    app.mount("/static", StaticFiles(directory=STATIC))
    app.add_middleware(GZipMiddleware, minimum_size=2000)
    return Guard(app, token, hosts or Hosts(), is_read_only=is_read_only)


def _explained(_: Request, error: Exception) -> JSONResponse:
    """An error that a user can fix, or a file that vanished while it was read."""
    if isinstance(error, RequestValidationError):
        problems = (f"{'.'.join(map(str, e['loc'][1:]))}: {e['msg']}" for e in error.errors())
        return JSONResponse(plain({"error": "; ".join(problems)}), 422)
    status = 404 if isinstance(error, OutsideRootError | FileNotFoundError) else 409
    return JSONResponse(plain({"error": str(error)}), status)


@dataclass(frozen=True)
class Guard:
    """Refuses what is not meant for the board, before any of its code runs."""

    app: ASGIApp
    token: str | None = None  # needed where others reach the address
    hosts: Hosts = field(default_factory=Hosts)
    is_read_only: bool = False
    recent: deque[float] = field(default_factory=deque)  # times of requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer or refuse one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        answering = self._refusal(Request(scope)) or self.app
        # A request in chunks does not say its length, so the bytes are counted as they come.
        await answering(scope, LimitedBody(receive, MAX_BODY), sending)

    def _refusal(self, request: Request) -> Response | None:
        headers, path = request.headers, request.url.path
        is_reading = request.method in ("GET", "HEAD")
        # Before all else, and all of them: headers.get would give the
        # first of two (decisions/0070).
        if why := self.hosts.refusal(headers.getlist("host"), "board"):
            return _refused(421, why)
        is_of_page = not path.startswith("/api/") or _is_from_here(headers)
        if not is_of_page or not (is_reading or _is_own(headers)):
            return _refused(403, "this request comes from another page")
        if self.is_read_only and not is_reading and path not in _HARMLESS:
            return _refused(403, "this board is read-only: it was started with --read-only")
        length = headers.get("content-length", "0")
        if not length.isdigit():
            return _refused(400, "content-length: expected digits")
        if int(length) > MAX_BODY:
            return _refused(413, f"more than {MAX_BODY:,} bytes")
        unknown = None if self.token is None else self._unknown(request)
        return unknown or self._too_many(path)  # those who may not ask are not counted

    def _too_many(self, path: str) -> Response | None:
        if not path.startswith("/api/"):
            return None
        now = time.monotonic()
        while self.recent and now - self.recent[0] > _WINDOW:
            self.recent.popleft()
        if len(self.recent) >= MAX_REQUESTS:
            return _refused(429, f"more than {MAX_REQUESTS} requests in {_WINDOW:.0f} s; wait")
        self.recent.append(now)
        return None

    def _unknown(self, request: Request) -> Response | None:
        """The way in by ``?token=``, or None if the token is there."""
        query_token = request.query_params.get("token", "")
        if self._is_token(query_token) and request.method == "GET":
            # Without the token in the address, which is copied, and stays in the history.
            entrance = RedirectResponse("./", 303)  # behind a proxy, below its path
            entrance.set_cookie(COOKIE, query_token, httponly=True, samesite="strict", path="/")
            return entrance
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self._is_token(request.cookies.get(COOKIE, "")) or self._is_token(bearer):
            return None
        return _refused(401, "open the address with ?token=… that `surefoot board` has printed")

    def _is_token(self, text: str) -> bool:
        # As bytes: text with letters beyond ASCII raises a TypeError.
        return hmac.compare_digest(text.encode(), (self.token or "").encode())


def _is_own(headers: Headers) -> bool:
    """Whether a request that changes something comes from the board's page, or from no page."""
    host, origin = headers.get("host"), headers.get("origin")
    if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
        return False
    return _is_from_here(headers) and headers.get(HEADER) == "1"


def _is_from_here(headers: Headers) -> bool:
    """Whether no page of another site has sent a request, as browsers say it."""
    return headers.get("sec-fetch-site", "same-origin") in ("same-origin", "none")


def _refused(status: int, why: str) -> Response:
    return PlainTextResponse(f"{why}\n", status)
