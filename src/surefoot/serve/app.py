"""The application: all addresses, their errors and the guard in front of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from .. import __version__
from .api import chat, completions, models
from .errors import HANDLERS
from .running.settings import ServeSettings
from .security import ApiGuard
from .server_state import ServerState


def create_app(settings: ServeSettings) -> ASGIApp:
    """The server of what ``settings`` name. The model is opened here, so that an error of it is one
    of the command line."""
    state = ServerState(settings)
    state.models.open_first()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        state.engine.start(asyncio.get_running_loop())
        await state.models.load_given()
        yield
        await asyncio.to_thread(state.engine.close)

    app = FastAPI(
        title="Surefoot", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None
    )
    for part in (chat, completions, models):
        app.include_router(part.routes(state), responses=_REFUSALS)
    for kind, handler in HANDLERS.items():
        app.add_exception_handler(kind, handler)
    app.get("/health")(lambda: JSONResponse({"status": "ok"}))
    _add_metrics(app, state)

    def note(path: str, status: int) -> None:
        state.metrics.requests.labels(path, str(status)).inc()

    return ApiGuard(app, settings.api_key, settings.hosts, settings.max_body, note)


_REFUSALS: dict[int | str, dict[str, object]] = {
    400: {"description": "The request is refused"},
    401: {"description": "The key is missing"},
    404: {"description": "There is no such model"},
    413: {"description": "The request is too large"},
    421: {"description": "The request is for another host"},
    429: {"description": "Too many requests are waiting"},
}


def _add_metrics(app: FastAPI, state: ServerState) -> None:
    engine, metrics = state.engine, state.metrics
    metrics.watch("surefoot_rows_running", "Responses being generated", lambda: engine.num_running)
    metrics.watch("surefoot_rows_waiting", "Responses without a slot", lambda: engine.num_waiting)
    metrics.watch("surefoot_rows_open", "Responses that clients wait for", lambda: state.num_open)

    metrics.watch("surefoot_passes", "Passes of models, of a token each", lambda: engine.num_steps)

    async def read() -> Response:
        """Figures in Prometheus' format."""
        return Response(metrics.text(), media_type="text/plain; version=0.0.4")

    app.get("/metrics")(read)
