"""``surefoot chat``: talk to a model on the terminal, or line by line from a script."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..terminal_text import one_line, visible
from .loading import dtype_option, loading, thinking_option, trust_remote_code_option
from .targets import ReadingCommand

if TYPE_CHECKING:
    from rich.console import Console

    from ..use.conversation import Answer, Conversation

HELP = """\
PATH            in a question, the path of a picture is that picture; a file dropped here, too
/clear          start a new conversation; the system message stays
/system TEXT    set the system message; without TEXT, remove it
/retry          generate the last response again
/result TEXT    answer a tool call with its result
/exit           exit; so does Ctrl-D. Ctrl-C ends a response early"""
_INCOMPLETE = {  # by why a response has ended
    "length": "(truncated at max_new_tokens; --max-new-tokens N allows more)",
    "context": "(truncated: the context length is reached; /clear starts a new conversation)",
    "interrupted": "(interrupted)",
}
_COMMAND = re.compile(r"/([a-z]+)(?:\s+(.*))?", re.DOTALL)


@click.command(cls=ReadingCommand)
@click.argument("path")
@click.option("--base", help="The base model of an adapter, if it moved.")
@click.option("--adapter", help="An adapter to put on the model of PATH.")
@click.option("--system", help="A system message.")
@click.option("--tools", help="JSON file of function schemas that the model may call.")
@thinking_option
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
    "--min-p",
    type=click.FloatRange(0, 1),
    help="Sample from tokens with this share of the most probable one's probability; 0 means all.",
)
@click.option(
    "--repetition-penalty",
    type=click.FloatRange(0, min_open=True),
    help="Above 1, tokens that already occurred become less probable.",
)
@click.option("--stop", multiple=True, help="A text that ends a response; may be repeated.")
@click.option("--greedy", is_flag=True, help="Always the most probable token.")
@click.option("--seed", type=int, help="Make sampling repeatable.")
@dtype_option
@trust_remote_code_option
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Read a request of one JSON object from each line of standard input, and write events: "
    "pieces of the answer, then its tokens with their probabilities.",
)
def chat(path: str, **options: object) -> None:
    """Talk to a model.

    PATH is a run's folder (its best or latest checkpoint), a checkpoint, an adapter, a model
    folder, a hub id, or a recipe. The chat template is the one saved with the model. Sampling
    follows the run's recipe (section generate), and is greedy if there is none; options override
    it.

    The path of a picture in a question, such as that of a file dropped into the terminal, is that
    picture, if the model reads any.

    When standard input is piped, each line is a separate conversation and gets one line of output;
    line breaks in an answer are written \\n.

    With --json, each line is a request such as {"messages": [{"role": "user", "content": "Hi"}],
    "seed": 1, "temperature": 0.7}, with the whole conversation and settings of the section
    generate.
    """
    conversation = _open(path, options)
    if options.pop("as_json"):
        _answer_requests(conversation)
    elif options["prompt"] is not None:
        _ask_once(conversation, str(options["prompt"]))
    elif sys.stdin.isatty():
        _talk_on_terminal(conversation, path)
    else:
        _ask_lines(conversation)


def _open(path: str, options: dict[str, object]) -> Conversation:
    with loading():
        from ..data.text.prompts import read_tools
        from ..errors import RecipeError
        from ..generate.section import with_options
        from ..recipe.prediction import PredictModel
        from ..schema.locations import ModelPath
        from ..use import Conversation
        from ..use.conversation import with_thinking
        from ..use.model_loading import open_predicted

    options["stop"] = options["stop"] or None  # of the recipe, unless there are others
    tools = read_tools(Path(str(options["tools"]))) if options["tools"] else ()
    model = PredictModel(
        path=ModelPath(path),
        adapter=options["adapter"],  # type: ignore[arg-type]
        base=options["base"],  # type: ignore[arg-type]
        reading=options["read_as"],  # type: ignore[arg-type]
        dtype=options["dtype"],  # type: ignore[arg-type]
        trust_remote_code=bool(options["trust_remote_code"]),
    )
    opened = open_predicted(model)
    try:
        section = with_options(opened.generate, options)
    except ValueError as error:
        raise RecipeError(f"generate: {error}") from None
    return Conversation(
        with_thinking(opened, options["thinking"]),  # type: ignore[arg-type]
        section,
        system=options["system"],  # type: ignore[arg-type]
        seed=options["seed"],  # type: ignore[arg-type]
        tools=tools,
    )


def _ask_once(conversation: Conversation, text: str) -> None:
    show = _writer()
    note_plain(conversation)
    answer = _ask(conversation, text, partial(click.echo, err=True), show)
    click.echo()
    for note in notes_on(answer):
        click.echo(note, err=True)


def _answer_requests(conversation: Conversation) -> None:
    """One JSON object per line, in and out; a request that is wrong gets an event ``error``."""
    import json

    from ..use.conversation import events

    def write(event: Mapping[str, object]) -> None:
        click.echo(json.dumps(event))
        sys.stdout.flush()

    write({"event": "ready", "has_template": conversation.has_template})
    for line in sys.stdin:
        if line.strip():
            for event in events(conversation, line, write):
                write(event)


def _ask_lines(conversation: Conversation) -> None:
    """Respond to every line by itself; one without a response gives an empty line, and a reason."""
    from ..errors import SurefootError

    note_plain(conversation)
    is_terminal = sys.stdout.isatty()
    for number, line in enumerate(sys.stdin, 1):
        conversation.clear()
        text = line.rstrip("\r\n")
        try:
            note = partial(click.echo, err=True)
            answer = _ask(conversation, text, note).text if text.strip() else ""
        except SurefootError as error:
            click.echo(f"line {number}: {error}", err=True)
            answer = ""
        answer = answer.replace("\n", "\\n")
        click.echo(visible(answer) if is_terminal else answer)
        sys.stdout.flush()


def _talk_on_terminal(conversation: Conversation, path: str) -> None:
    import contextlib

    from rich.console import Console
    from rich.text import Text

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - line editing and history for input()
    console = Console(markup=False, highlight=False)
    title = Text.assemble((one_line(path), "bold"), " · /help shows the commands, Ctrl-D leaves")
    console.print(title, style="cyan")
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
            console.print(f"{error}{advice}", style="yellow")


def _reply(conversation: Conversation, console: Console, line: str) -> bool:
    """Respond to a line, or run the command in it; False to exit."""
    from rich.text import Text

    from ..errors import RunError

    def show(piece: str) -> None:
        console.print(Text(visible(piece)), end="", soft_wrap=True)

    match = _COMMAND.fullmatch(line.strip())
    command, text = (match[1], (match[2] or "").strip()) if match else (None, line)
    answer = None
    if command in ("exit", "quit"):
        return False
    if command is None:
        says = partial(console.print, style="dim")
        answer = _ask(conversation, text, says, show) if text.strip() else None
    elif command == "retry" and conversation.messages:
        answer = conversation.retry(show)
    elif command == "retry":
        console.print("there is no response yet", style="yellow")
    elif command == "result":
        if not conversation.messages or not conversation.messages[-1].tool_calls:
            raise RunError("/result: the last response calls no tool; --tools FILE offers some")
        answer = conversation.ask(text, show, role="tool")
    elif command == "clear":
        conversation.clear()
        console.print("a new conversation", style="dim")
    elif command == "system":
        conversation.set_system(text)
        console.print(f"system message: {conversation.system or 'none'}", style="dim")
    else:
        if command != "help":
            console.print(f"no command /{command}; there are", style="yellow")
        console.print(HELP, style="dim")
    if answer is not None:
        console.print()
        for note in notes_on(answer):
            console.print(note, style="yellow")
    return True


def _ask(
    conversation: Conversation,
    text: str,
    note: Callable[[str], None],
    show: Callable[[str], None] | None = None,
) -> Answer:
    """The response to a question, in which the path of a picture is that picture; ``note`` gets a
    line that says so. Raises ``RunError``: it cannot be read."""
    from ..data.media.files import MAX_BYTES
    from ..errors import RunError
    from ..storage.files import read_file
    from ..use.conversation import with_typed_pictures

    marked, paths = with_typed_pictures(text)
    names = visible(", ".join(map(str, paths)))
    if paths and conversation.opened.media is None:
        note(f"{names}: not looked at, only the name is read: {conversation.opened.why_text}")
        return conversation.ask(text, show)
    if paths:
        note(f"{'pictures' if len(paths) > 1 else 'picture'}: {names}")
    try:
        media = [read_file(path, MAX_BYTES) for path in paths]
    except OSError as error:
        raise RunError(f"{names}: cannot be read: {error.strerror}") from None
    return conversation.ask(marked, show, media=media)


def note_plain(conversation: Conversation) -> None:
    """Print once if the model has no chat template."""
    if not conversation.has_template:
        click.echo(
            "this model has no chat template: every text is continued by itself, as plain text",
            err=True,
        )


def notes_on(answer: Answer) -> Iterator[str]:
    """The tool calls of a response, and a note if it did not end by itself."""
    for call in answer.tool_calls:
        arguments = json.dumps(call["arguments"], ensure_ascii=False)
        yield visible(f"tool call: {call['name']}({arguments})")
    for text in answer.broken_calls:
        yield visible(f"a tool call that cannot be read: {text}")
    if answer.finish_reason != "stop":
        yield _INCOMPLETE[answer.finish_reason]


def _writer() -> Callable[[str], None]:
    """Writes pieces to standard output as they are generated."""
    is_terminal = sys.stdout.isatty()

    def write(piece: str) -> None:
        click.echo(visible(piece) if is_terminal else piece, nl=False)
        sys.stdout.flush()

    return write
