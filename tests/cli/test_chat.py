"""The chat command: on a terminal, with one prompt, and in a pipe."""

import io
import os
import pty
import sys
import time

import pytest
from rich.console import Console

import commands
import warm
from folders import save_adapter, save_model, save_recipe
from surefoot.cli.chat import talk, visible
from surefoot.generate.section import GenerateSection, with_options
from surefoot.use import Conversation, open_model

run, _, refused = commands.of("chat")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    save_model(folder / "base")
    save_adapter(folder / "base", folder / "adapter")
    save_model(folder / "plain", template=None)
    return folder


def answer(path, text, count=6, **options):
    section = GenerateSection(max_new_tokens=count)
    return Conversation(open_model(path), section, **options).ask(text).text


def test_a_prompt_is_answered_once_and_plainly(folder):
    done = run(folder / "base", "--prompt", "Hi", "--max-new-tokens", 6)
    assert done.exit_code == 0
    assert done.stdout == answer(folder / "base", "Hi") + "\n"
    assert "truncated at max_new_tokens" in done.stderr


def test_a_stop_text_cuts_the_answer(folder):
    whole = answer(folder / "base", "Hi", 8)
    stops = ["--stop", whole[3:5], "--stop", "never"]
    done = run(folder / "base", "--prompt", "Hi", "--max-new-tokens", 8, *stops)
    assert done.stdout == whole[: whole.index(whole[3:5])] + "\n"
    assert not done.stderr
    done = run(folder / "base", "--prompt", "Hi", "--stop", "")
    assert done.exit_code
    assert "stop must not contain an empty text" in done.stderr
    assert "Traceback" not in done.stderr


def test_every_piped_line_has_one_line_of_answer_of_its_own(folder):
    done = run(folder / "base", "--max-new-tokens", 6, stdin="Hi\n\nHo\nHi\n")
    hi, ho = (answer(folder / "base", t).replace("\n", "\\n") for t in ("Hi", "Ho"))
    assert done.stdout == f"{hi}\n\n{ho}\n{hi}\n"


def test_an_adapter_is_talked_to_either_way(folder):
    expected = answer(folder / "adapter", "Hi") + "\n"
    assert expected != answer(folder / "base", "Hi") + "\n"
    options = ["--prompt", "Hi", "--max-new-tokens", 6]
    assert run(folder / "adapter", *options).stdout == expected
    assert run(folder / "adapter", "--base", folder / "base", *options).stdout == expected
    assert run(folder / "base", "--adapter", folder / "adapter", *options).stdout == expected


def test_the_system_message_is_used(folder):
    options = ["--prompt", "Hi", "--max-new-tokens", 6, "--system", "Be brief."]
    expected = answer(folder / "base", "Hi", system="Be brief.")
    assert run(folder / "base", *options).stdout == expected + "\n"


def test_a_recipe_gives_its_checkpoint_and_its_way_to_sample(tmp_path):
    import surefoot

    recipe = save_recipe(tmp_path, method={"lora": {"rank": 2}}, generate={"max_new_tokens": 3})
    surefoot.train(recipe)
    done = run(recipe, "--prompt", "1+1?")
    assert done.stdout == answer(tmp_path / "run" / "checkpoint-4", "1+1?", 3) + "\n"


def test_a_line_without_room_gives_an_empty_line_and_a_reason(folder):
    done = run(folder / "base", "--max-new-tokens", 6, stdin="x" * 300 + "\nHi\n")
    first, second, _ = done.stdout.split("\n")
    assert (first, bool(second)) == ("", True)
    assert "line 1: no room for a response" in done.stderr


def test_a_model_without_a_template_says_what_it_does(folder):
    done = run(folder / "plain", "--prompt", "Once", "--max-new-tokens", 6)
    assert done.stdout == answer(folder / "plain", "Once") + "\n"
    assert "continued by itself, as plain text" in done.stderr
    message = refused(folder / "plain", "--prompt", "Once", "--system", "x")
    assert "supports no system message" in message


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        ({}, {}),
        ({"temperature": 0.5}, {"temperature": 0.5, "do_sample": True}),
        ({"top_k": 3, "top_p": 0.9}, {"top_k": 3, "top_p": 0.9, "do_sample": True}),
        ({"min_p": 0.1}, {"min_p": 0.1, "do_sample": True}),
        ({"min_p": 0.0}, {}),
        ({"min_p": 0.2, "greedy": True}, {"do_sample": False}),
        ({"temperature": 0.0}, {"do_sample": False}),
        ({"temperature": 0.5, "greedy": True}, {"do_sample": False}),
        ({"max_new_tokens": 3, "seed": 1}, {"max_new_tokens": 3}),
        ({"repetition_penalty": 1.2}, {"repetition_penalty": 1.2}),
    ],
)
def test_options_win_over_the_recipe(options, changes):
    section = GenerateSection(max_new_tokens=9)
    expected = GenerateSection(**{"max_new_tokens": 9, **changes})
    assert with_options(section, options) == expected


def converse(opened, *lines, count=6):
    """Type ``lines``; what appears on the screen."""
    screen, remaining = io.StringIO(), iter(lines)

    def read():
        line = next(remaining, None)
        if line is None:
            raise EOFError
        screen.write(f"> {line}\n")
        return line

    conversation = Conversation(opened, GenerateSection(max_new_tokens=count))
    talk(conversation, Console(file=screen, width=80), read)
    return screen.getvalue(), conversation


@pytest.fixture(scope="module")
def opened(folder):
    return open_model(folder / "base")


def test_a_talk_shows_answers_and_remembers_them(opened, folder):
    screen, conversation = converse(opened, "Hi", "", "Ho")
    assert [m.content for m in conversation.messages[::2]] == ["Hi", "Ho"]
    assert visible(answer(folder / "base", "Hi")) in screen
    assert screen.count("truncated at max_new_tokens") == 2


def test_commands_do_what_they_say(opened):
    screen, conversation = converse(
        opened, "Hi", "/clear", "/system Be kind.", "/help", "/sistem x", "/exit", "never read"
    )
    assert conversation.messages == []
    assert conversation.system == "Be kind."
    assert "never read" not in screen
    assert screen.count("/system TEXT") == 2
    assert "no command /sistem" in screen
    assert converse(opened, "/system A", "/system")[1].system is None


def test_a_response_is_generated_again_in_place_of_the_last(opened):
    out, conversation = converse(opened, "/retry", "Hi", "Ho", "/retry")
    assert "there is no response yet" in out
    assert "the message was not added" not in out
    again = conversation.messages
    assert [m.content for m in again if m.role == "user"] == ["Hi", "Ho"]
    assert again == converse(opened, "Hi", "Ho")[1].messages, "greedy"


def test_what_only_looks_like_a_command_is_said_to_the_model(opened):
    _, conversation = converse(opened, "/usr/bin holds what?", "[bold]not markup[/]")
    assert len(conversation.messages) == 4


def test_a_full_window_says_what_to_do_and_the_talk_goes_on(opened):
    screen, conversation = converse(opened, "Hi", "x" * 300, "Ho")
    assert "no room for a response" in " ".join(screen.split())
    assert "/clear starts a new conversation" in " ".join(screen.split())
    assert [m.content for m in conversation.messages[::2]] == ["Hi", "Ho"]


def test_a_real_terminal_talks_in_turns(folder):
    """Through a pseudo-terminal, as a person would."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "surefoot", "chat", str(folder / "base"), "--max-new-tokens=5"]
    process = warm.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "dumb"}
    )
    os.close(theirs)
    screen = b""

    def wait_for(text, count):
        nonlocal screen
        deadline = time.monotonic() + 60
        while screen.count(text) < count and time.monotonic() < deadline:
            screen += os.read(ours, 4096)
        assert screen.count(text) >= count, screen

    wait_for(b"you> ", 1)
    os.write(ours, b"Hi\n")
    wait_for(b"you> ", 2)
    os.write(ours, b"/exit\n")
    assert process.wait(60) == 0
    os.close(ours)
    assert b"truncated at max_new_tokens" in screen


def test_a_real_model_tells_a_story(shared):
    path = shared / "models" / "stories260k"
    done = run(path, "--prompt", "Once upon a time, there was a", "--max-new-tokens", 40)
    assert "continued by itself" in done.stderr
    words = done.stdout.split()
    assert len(words) > 8
    assert {"the", "and", "was", "to", "a"} & set(words)
