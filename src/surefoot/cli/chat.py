"""``surefoot chat``: talk to a model on the terminal, or line by line from a script."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from ..terminal_text import visible
from .loading import loading

if TYPE_CHECKING:
    from rich.console import Console

    from ..inference.conversation import Answer, Conversation

HELP = """\
/clear          start a new conversation; the system message stays
/system TEXT    set the system message; without TEXT, remove it
/exit           exit; so does Ctrl-D. Ctrl-C ends a response early"""
_COMMAND = re.compile(r"/([a-z]+)(?:\s+(.*))?", re.DOTALL)


@click.command()
@click.argument("path")
@click.option("--base", help="The base model of an adapter, if it moved.")
@click.option("--adapter", help="An adapter to put on the model of PATH.")
@click.option("--system", help="A system message.")
@click.option("--prompt", help="Ask this once, print the response and exit.")
@click.option("--max-new-tokens", type=click.IntRange(1), help="Longest response in tokens.")
@click.option(
    "--temperature",
    type=click.FloatRange(0),
    help="Sample, flatter above 1, sharper below; 0 is --greedy.",
)
@click.option(
    "--top-p",
    type=click.FloatRange(0, 1, min_open=True),
    help="Sample from the most probable tokens that together have this probability.",
)
@click.option(
    "--top-k",
    type=click.IntRange(0),
    help="Sample from this many most probable tokens; 0 means all.",
)
@click.option(
    "--repetition-penalty",
    type=click.FloatRange(0, min_open=True),
    help="Above 1, tokens that already occurred become less probable.",
)
@click.option("--greedy", is_flag=True, help="Always the most probable token.")
@click.option("--seed", type=int, help="Make sampling repeatable.")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
    default="auto",
    show_default=True,
    help="Type of the weights.",
)
@click.option("--trust-remote-code", is_flag=True, help="Run code that comes with the model.")
def chat(path: str, **options: object) -> None:
    """Talk to a model.

    PATH is a run's folder (its best or latest checkpoint), a checkpoint, an adapter, a model
    folder, a hub id, or a recipe. The chat template is the one saved with the model. Sampling
    follows the run's recipe (section generate), and is greedy if there is none; options override
    it.

    When standard input is piped, each line is a separate conversation and gets one line of output;
    line breaks in an answer are written \\n.
    """
    conversation = _open(path, options)
    if options["prompt"] is not None:
        _ask_once(conversation, str(options["prompt"]))
    elif sys.stdin.isatty():
        _talk_on_terminal(conversation, path)
    else:
        _ask_lines(conversation)


def _open(path: str, options: dict[str, object]) -> Conversation:
    with loading():
        from ..generate.section import with_options
        from ..inference import Conversation, open_model

    opened = open_model(
        path,
        adapter=options["adapter"],  # type: ignore[arg-type]
        base=options["base"],  # type: ignore[arg-type]
        dtype=options["dtype"],  # type: ignore[arg-type]
        trust_remote_code=bool(options["trust_remote_code"]),
    )
    return Conversation(
        opened,
        with_options(opened.generate, options),
        system=options["system"],  # type: ignore[arg-type]
        seed=options["seed"],  # type: ignore[arg-type]
    )


def _ask_once(conversation: Conversation, text: str) -> None:
    show = _writer()
    note_plain(conversation)
    answer = conversation.ask(text, show)
    click.echo()
    if note := note_on(answer):
        click.echo(note, err=True)


def _ask_lines(conversation: Conversation) -> None:
    """Respond to every line by itself; one without a response gives an empty line, and a reason."""
    from ..errors import SurefootError

    note_plain(conversation)
    is_terminal = sys.stdout.isatty()
    for number, line in enumerate(sys.stdin, 1):
        conversation.clear()
        text = line.rstrip("\r\n")
        try:
            answer = conversation.ask(text).text if text.strip() else ""
        except SurefootError as error:
            click.echo(f"line {number}: {error}", err=True)
            answer = ""
        answer = answer.replace("\n", "\\n")
        click.echo(visible(answer) if is_terminal else answer)
        sys.stdout.flush()


def _talk_on_terminal(conversation: Conversation, path: str) -> None:
    import contextlib

    from rich.console import Console

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - line editing and history for input()
    console = Console(highlight=False)
    console.print(f"[bold]{path}[/] · /help shows the commands, Ctrl-D leaves", style="cyan")
    talk(conversation, console, lambda: input("\nyou> "))


def talk(conversation: Conversation, console: Console, read: Callable[[], str]) -> None:
    """Prompts from ``read``, responses to ``console``, until the input ends or /exit."""
    from ..errors import RunError, SurefootError

    note_plain(conversation)
    while True:
        try:
            line = read()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        try:
            if not _reply(conversation, console, line):
                return
        except SurefootError as error:
            advice = (
                "; the message was not added, /clear starts a new conversation"
                if isinstance(error, RunError)
                else ""
            )
            console.print(f"{error}{advice}", style="yellow", markup=False)


def _reply(conversation: Conversation, console: Console, line: str) -> bool:
    """Run the command of the line; False to exit."""
    from rich.text import Text

    if not line.strip():
        return True
    if command := _COMMAND.fullmatch(line.strip()):
        return _obey(conversation, console, command[1], command[2] or "")
    answer = conversation.ask(
        line, lambda piece: console.print(Text(visible(piece)), end="", soft_wrap=True)
    )
    console.print()
    if note := note_on(answer):
        console.print(note, style="yellow")
    return True


def _obey(conversation: Conversation, console: Console, command: str, text: str) -> bool:
    if command in ("exit", "quit"):
        return False
    if command == "clear":
        conversation.clear()
        console.print("a new conversation", style="dim")
    elif command == "system":
        conversation.set_system(text.strip())
        console.print(f"system message: {conversation.system or 'none'}", style="dim", markup=False)
    else:
        if command != "help":
            console.print(f"no command /{command}; there are", style="yellow")
        console.print(HELP, style="dim", markup=False)
    return True


def note_plain(conversation: Conversation) -> None:
    """Print once if the model has no chat template."""
    if not conversation.has_template:
        click.echo(
            "this model has no chat template: every text is continued by itself, as plain text",
            err=True,
        )


def note_on(answer: Answer) -> str | None:
    """A note if a response did not end by itself."""
    return {
        "stop": None,
        "length": "(truncated at max_new_tokens; --max-new-tokens N allows more)",
        "context": "(truncated: the context length is reached; /clear starts a new conversation)",
        "interrupted": "(interrupted)",
    }[answer.finish_reason]


def _writer() -> Callable[[str], None]:
    """Writes pieces to standard output as they are generated."""
    is_terminal = sys.stdout.isatty()

    def write(piece: str) -> None:
        click.echo(visible(piece) if is_terminal else piece, nl=False)
        sys.stdout.flush()

    return write
