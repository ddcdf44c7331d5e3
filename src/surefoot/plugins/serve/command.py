"""``surefoot serve``: a model, a run and its checkpoints behind OpenAI's API."""

from __future__ import annotations

import contextlib
import secrets
from pathlib import Path

import click

from ...cli.loading import dtype_option, loading, trust_remote_code_option
from ...errors import RunError, installation

_SECONDS_TO_FINISH = 30  # for requests that have begun when the server is stopped
_EXTRA = ("fastapi", "uvicorn", "starlette")


@click.command()
@click.argument("path")
@click.option("--port", default=8000, show_default=True, type=click.IntRange(0, 65535))
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen on. Others than this machine's own need a key.",
)
@click.option(
    "--host-name",
    "host_names",
    multiple=True,
    metavar="NAME",
    help="A name, besides this machine's own, under which requests reach the server; may be "
    "repeated. It needs a key, too.",
)
@click.option(
    "--api-key",
    envvar="SUREFOOT_API_KEY",
    help="Requests must have it. Unset: none on this machine's own address, else a random one.",
)
@click.option("--name", help="Name of the model in requests. Unset: that of its folder.")
@click.option("--base", help="The base model of an adapter, if it moved.")
@click.option(
    "--adapter",
    "adapters",
    multiple=True,
    metavar="NAME=FOLDER",
    help="An adapter to serve on the same base under a name; may be repeated.",
)
@click.option(
    "--media-folder",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Requests may name pictures in this folder. Unset: they must contain them (data URLs).",
)
@click.option(
    "--max-batch",
    default=32,
    show_default=True,
    type=click.IntRange(1),
    help="Responses that are generated at a time.",
)
@click.option(
    "--max-waiting",
    default=256,
    show_default=True,
    type=click.IntRange(0),
    help="Responses that wait at a time; beyond, requests are refused with 429.",
)
@click.option(
    "--max-length",
    type=click.IntRange(2),
    help="Most tokens of prompt and response. Unset: the model's context length.",
)
@click.option(
    "--sampled-logprobs",
    is_flag=True,
    help="Log-probabilities after penalties and temperature, as training on samples needs them.",
)
@click.option(
    "--batch-invariant",
    is_flag=True,
    help="Compute a response in the same shapes whatever else is answered; slower for one client. "
    "Unset: as generate.batch_invariant of the run says.",
)
@dtype_option
@trust_remote_code_option
def serve(path: str, port: int, host: str, **options: object) -> None:
    """Serve a model through OpenAI's API.

    PATH is a run's folder (its best or latest checkpoint), a checkpoint, an adapter, a model
    folder or a hub id. A request's "model" picks a checkpoint of the run (checkpoint-400), the
    model under its adapter (base), or an adapter. What a request leaves open of sampling is as in
    `surefoot chat`: the run's section generate, or greedy.
    """
    adapters = tuple(map(_adapter, options.pop("adapters")))  # type: ignore[call-overload]
    host_names = options.pop("host_names")
    try:
        with loading():
            from ...storage import web
            from .app import create_app
            from .models import ServeSettings
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in _EXTRA:
            raise
        raise RunError(
            f"the server needs {error.name}, which is not installed: "
            f"{installation('fastapi', 'serve')}"
        ) from None
    hosts = web.hosts_of(host, host_names)  # type: ignore[arg-type]
    new_key = secrets.token_urlsafe(24) if hosts.is_open and not options["api_key"] else None
    options["api_key"] = options["api_key"] or new_key
    settings = ServeSettings(path=path, adapters=adapters, hosts=hosts, **options)  # type: ignore[arg-type]
    shown = f"  (key: {new_key})" if new_key else ""
    with contextlib.closing(web.bound(host, port, "server")) as listener:
        app = create_app(settings)
        address = f"{web.address_of(host, listener)}v1{shown}"
        click.echo(f"serving {path}\n{address}  (Ctrl-C ends the server)")
        web.serve(app, listener, seconds_to_finish=_SECONDS_TO_FINISH)


def _adapter(text: str) -> tuple[str, str]:
    name, equals, folder = text.partition("=")
    if not (name and equals and folder):
        raise click.BadParameter(f"{text!r}: expected NAME=FOLDER", param_hint="--adapter")
    return name, folder
