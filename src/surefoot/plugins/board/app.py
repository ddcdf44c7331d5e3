"""The server of the board: pages, API and guard in one application."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse
from starlette.middleware.gzip import GZipMiddleware
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from ...errors import SurefootError
from ...storage.web import Hosts
from ...terminal_text import plain
from .api import routes
from .board import Board
from .run_folders import OutsideRootError
from .security import Guard

STATIC = Path(__file__).parent / "static"


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
    app.include_router(routes(board))
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
        said = (f"{'.'.join(map(str, e['loc'][1:]))}: {e['msg']}" for e in error.errors())
        return JSONResponse(plain({"error": "; ".join(said)}), 422)
    status = 404 if isinstance(error, OutsideRootError | FileNotFoundError) else 409
    return JSONResponse(plain({"error": str(error)}), status)
