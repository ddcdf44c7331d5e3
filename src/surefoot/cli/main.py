"""``surefoot``: a table of commands. Each is imported when it is used, so that help is instant."""

from __future__ import annotations

import errno
import importlib
import io
import logging
import os
import sys
import time
import traceback
from itertools import islice

import click
from click.shell_completion import CompletionItem

from .. import __version__
from ..errors import (
    OUT_OF_MEMORY,
    LostPeerError,
    OutOfMemoryError,
    SurefootError,
    explain,
    shortened,
)
from ..extensions import bundled_commands, entries, imported
from ..log import configure
from ..terminal_text import visible

logger = logging.getLogger(__name__)
_FORMAT = "SUREFOOT_LOG_FORMAT"
_WORDS = f"{__name__}.words"  # of the command, in click's context
_ECHO = 10.0  # seconds for the process that has more to say, upon which the launcher ends this one
# what a path or a disk of the user's causes, wherever it is looked at, and no code of ours does
_OF_THE_DISK = {errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.EROFS, errno.EIO}
# what the system refuses, whether it names a file or, in writing or in starting a process, none
_OF_THE_SYSTEM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENFILE}
_HELP = {"-h", "--help"}
# commands whose standard output has messages only, but for what these options print
_WITHOUT_RESULTS = {"train", "launch", "serve", "sweep", "encode", "push", "board"}
_PRINT_RESULTS = {"--dry-run", "--json"}
# name -> what it does, in the order of help; the command stands in the module of that name, or in
_MODULES = {"preview": "data", "download": "data", "encode": "data"}
_MODULES |= {"rollouts": "reward", "plugins": "env"}
COMMANDS = {
    "demo": "Train a bundled model on bundled data, and show what it has learned.",
    "train": "Train a model from a recipe; run it again to resume.",
    "preview": "Show the tokenized data as the model reads it, and which tokens are trained on.",
    "download": "Fetch the model and the datasets of a recipe, for a machine without a network.",
    "data": "Check the rows of a recipe before training: lengths, duplicates, overlap.",
    "encode": "Encode the data of a recipe before its run.",
    "plan": "Estimate steps, tokens, memory, disk and time of a run, without loading weights.",
    "bench": "Measure how fast a recipe trains on this machine.",
    "reward": "Try the rewards of a recipe on sampled responses.",
    "rollouts": "Show the sampled responses that a run has kept, with their rewards.",
    "replay": "Compute steps of a run again, and compare them to the bit.",
    "rows": "Show the worst rows of a run, and those of a step.",
    "fork": "Continue a run from any of its steps, in a new folder.",
    "chat": "Talk to a model, a checkpoint or an adapter.",
    "predict": "Generate responses to prompts, on one process or many.",
    "eval": "Evaluate a run on held-out data: loss, perplexity, exact match.",
    "export": "Write a model for use elsewhere, its adapter merged.",
    "ckpt": "List, show, compare, verify, prune and convert checkpoints.",
    "recipe": "Show a recipe in full, convert one, or print the JSON schema of recipes.",
    "env": "Report versions, devices, memory and disk.",
    "plugins": "List what plugins add, where each comes from, and what does not load.",
    "version": "Print the version.",
}


SYNONYMS = {  # what other programs call a command
    **dict.fromkeys(("finetune", "fine-tune", "sft", "fit", "dpo", "pretrain", "run"), "train"),
    **dict.fromkeys(("generate", "infer", "inference"), "predict"),
    **dict.fromkeys(("evaluate", "test"), "eval"),
    **dict.fromkeys(("merge", "merge-lora", "save"), "export"),
    **dict.fromkeys(("ui", "gui", "web", "dashboard"), "board"),
    **{"benchmark": "bench", "upload": "push", "convert": "ckpt convert", "config": "recipe"},
    "api": "serve",
}
ALIASES = dict.fromkeys(("webui", "webchat"), "board")  # what people type who come from elsewhere


def listed() -> dict[str, str]:
    """Name -> what it does, of our commands and of those of the bundled plugins."""
    return COMMANDS | {name: purpose for name, (purpose, _) in bundled_commands().items()}


def _of_a_plugin(name: str) -> click.Command | None:
    """The command that a plugin adds; entry points are read for what is not bundled only."""
    place = bundled_commands().get(name, ("", ""))[1]
    if not place and (entry := entries("commands").get(name)):
        place = entry.place
    return imported(place) if place else None


class Commands(click.Group):
    """A group that knows its commands' names and help without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names, in the order of the table."""
        return list(listed())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the module of a command."""
        if cmd_name in self.commands:
            return super().get_command(ctx, cmd_name)
        if cmd_name not in COMMANDS:
            return _of_a_plugin(cmd_name)
        module = importlib.import_module(f".{_MODULES.get(cmd_name, cmd_name)}", __package__)
        values = vars(module).values()
        return next(v for v in values if isinstance(v, click.Command) and v.name == cmd_name)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """The commands and options that begin so; no command is imported for it."""
        matches = ((n, h) for n, h in listed().items() if n.startswith(incomplete))
        commands = [CompletionItem(n, help=h) for n, h in matches]
        return [*commands, *click.Command.shell_complete(self, ctx, incomplete)]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command, or suggest the nearest one."""
        if args[0] in ALIASES:
            name = ALIASES[args[0]]
            click.echo(f"{args[0]}: starting `surefoot {name}`, which is its name here", err=True)
            args = [name, *args[1:]]
        is_known = args[0] in listed() or args[0].startswith("-")
        if not is_known and _of_a_plugin(args[0]) is None:
            if args[0] in SYNONYMS:
                hint = f"No such command {args[0]!r}. Did you mean {SYNONYMS[args[0]]}?"
                raise click.NoSuchCommand(args[0], hint, ctx=ctx)
            raise click.NoSuchCommand(args[0], possibilities=listed(), ctx=ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The table."""
        with formatter.section("Commands"):
            formatter.write_dl(list(listed().items()))
        with formatter.indentation():
            formatter.write("\n  `surefoot plugins` lists those of packages that you installed.\n")

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Accept --verbose and --log-format anywhere on the line."""
        of_main, rest, words = [], [], iter(args)
        for word in words:
            if word == "--log-format":
                of_main += [word, *islice(words, 1)]
            elif word == "--verbose" or word.startswith("--log-format="):
                of_main.append(word)
            else:
                rest.append(word)
        ctx.meta[_WORDS] = rest
        try:
            return super().parse_args(ctx, of_main + rest)
        except click.UsageError as error:
            is_json = os.environ.get(_FORMAT) == "json" or any(w.endswith("json") for w in of_main)
            if not is_json or not args:
                raise
            _write_json(ctx, verbose=False)
            raise Failure(error.format_message()) from error

    def invoke(self, ctx: click.Context) -> object:
        """Run the command; errors that a user can fix are shown in red, without a traceback."""
        try:
            return super().invoke(ctx)
        except SurefootError as error:
            if ctx.params["verbose"]:
                traceback.print_exc()
            raise failure_of(error) from error
        except OSError as error:
            is_of_a_file = error.errno in _OF_THE_DISK and error.filename is not None
            if not is_of_a_file and error.errno not in _OF_THE_SYSTEM:
                raise
            if ctx.params["verbose"]:
                traceback.print_exc()
            raise Failure(explain(error)) from error
        except UnicodeEncodeError as error:
            if error.encoding.startswith("utf"):
                raise  # half of a character, which no environment has
            if ctx.params["verbose"]:
                traceback.print_exc()
            raise Failure(
                f"{error.object!r}: names of files are written in {error.encoding} here, which has "
                f"no {error.object[error.start]!r}; unset PYTHONUTF8, and set LC_ALL=C.UTF-8"
            ) from error
        except click.UsageError as error:
            message = shortened(error.format_message())
            if ctx.params["log_format"] == "json":
                _write_json(ctx, verbose=False)  # of an unknown command, ``main`` has not run
                raise Failure(message) from error  # without the lines of usage
            raise click.UsageError(message, error.ctx) from error
        except KeyboardInterrupt:
            click.echo(err=True)  # end the line that has the terminal's ^C
            raise click.exceptions.Exit(130) from None  # 128 + SIGINT, as shells have it


class Failure(click.ClickException):
    """An error that the user can fix: exit code 2, as for a wrong option."""

    exit_code = 2

    def show(self, file: object = None) -> None:
        """Print ``error: ...`` on standard error."""
        if os.environ.get(_FORMAT) == "json":
            fields = {"event": "error", "exit_code": self.exit_code}
            logger.error("%s", shortened(self.message), extra={"fields": fields})
            return
        lines = shortened(self.message).splitlines()
        before = " " if len(lines) == 1 else "\n  "
        text = "".join(f"{before}{line}" for line in lines)
        click.echo(click.style("error:", fg="red", bold=True) + visible(text), err=True)


class PeerFailure(Failure):
    """Another rank has failed, so a restart may succeed: the exit code is not 2."""

    exit_code = 1


class MemoryFailure(Failure):
    """A rank is out of memory: all ranks start again with smaller batches."""

    exit_code = OUT_OF_MEMORY


def failure_of(error: SurefootError) -> click.exceptions.Exit | Failure:
    """How the process ends for ``error``. A rank that only echoes the error of another waits, so
    that the cause is printed first."""
    if isinstance(error, OutOfMemoryError):
        return MemoryFailure(str(error))
    is_echo = isinstance(error, LostPeerError)
    if isinstance(error, LostPeerError) and error.ended_by is not None:
        return click.exceptions.Exit(128 + error.ended_by)
    if is_echo or os.environ.get("RANK", "0") != "0":
        time.sleep(_ECHO)
    return (PeerFailure if is_echo else Failure)(str(error))


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--verbose", is_flag=True, help="Log more, and show the traceback of errors.")
@click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    default="text",
    envvar=_FORMAT,
    show_default=True,
    show_envvar=True,
    help="How messages are written: for people, or as JSON lines for a log collector.",
)
@click.version_option(__version__, prog_name="surefoot", message="%(prog)s %(version)s")
@click.pass_context
def main(ctx: click.Context, verbose: bool, log_format: str) -> None:
    """Fine-tune large language models from one YAML file; no step is ever lost.

    \b
    surefoot train recipe.yaml
    surefoot train recipe.yaml optim.adamw.learning_rate=5e-5
    """
    if "SLURM_PROCID" in os.environ:
        from ..parallel.section import name_ranks

        name_ranks()
    if isinstance(sys.stdout, io.TextIOWrapper):  # a name may have letters that a terminal lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    if log_format == "json" and not _HELP & set(ctx.meta[_WORDS]):
        _write_json(ctx, verbose=verbose)
    else:
        os.environ.pop(_FORMAT, None)  # the option has precedence, here and in ranks
        configure(verbose=verbose)


def _write_json(ctx: click.Context, *, verbose: bool) -> None:
    """Let all messages leave as JSON lines, also an exception that nothing catches."""
    from .. import json_lines

    is_result = bool(_PRINT_RESULTS & set(ctx.meta[_WORDS]))
    has_messages_only = ctx.invoked_subcommand in _WITHOUT_RESULTS and not is_result
    json_lines.start((1, 2) if has_messages_only else (2,))
    configure(verbose=verbose, formatter=json_lines.Formatter())
    sys.excepthook = lambda *fault: logger.critical("%s", fault[1], exc_info=fault)


@main.command()
def version() -> None:
    """Print the version."""
    click.echo(__version__)
