"""A template that loops for some texts alone: an error with its name and the row, not a hang."""

import contextlib
import threading
import time
from functools import partial

import pytest

import tiny_tokenizers
from surefoot.data.example import Example, Message
from surefoot.data.section import DataSection
from surefoot.data.text.codec import Codec
from surefoot.data.text.templates import deadline, load_template
from surefoot.data.text.templates.deadline import Deadline
from surefoot.errors import TemplateLimitError

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LOOPING = (
    "{% if messages[0].content | length > 1000 %}{% for i in range(99999) %}"
    "{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}"
) + CHATML


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(deadline, "SECONDS", 0.3)


@pytest.fixture
def codec():
    tokenizer = tiny_tokenizers.tokenizer(chat_template=LOOPING)
    return Codec(tokenizer, load_template("auto", tokenizer), DataSection(datasets=("any",)))


def chat(text, row):
    return Example((Message("user", text), Message("assistant", "yes")), origin=f"mine:{row}")


@pytest.mark.parametrize("encode", ["encode_chats", "encode_prompts"])
def test_the_row_and_the_template_are_named(encode, codec):
    rows = [chat("short", 0), chat("short", 1), chat("long " * 300, 2), chat("short", 3)]
    with pytest.raises(TemplateLimitError) as caught:
        getattr(codec, encode)(rows)
    said = str(caught.value)
    assert said.startswith("mine:2: the chat template (auto) does not end within 0.3 seconds for")
    assert "choose another data.template" in said
    assert len(getattr(codec, encode)(rows[:2])) == 2  # it still works


def test_a_single_conversation_says_so_too(codec):
    with pytest.raises(
        TemplateLimitError, match=r"this conversation for more than 0.3 seconds; data"
    ):
        codec.encode_prompt([Message("user", "long " * 300)])


def test_nothing_is_raised_after_a_rendering_has_ended(monkeypatch):
    """Renderings that end about when their time does, in several threads."""
    monkeypatch.setattr(deadline, "SECONDS", 0.02)
    monkeypatch.setattr(deadline, "_POLL", 0.001)
    limit, wrong = Deadline(), []

    def busy(seconds):
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass
        return seconds

    def work():
        for i in range(15):
            seconds = 0.018 + 0.0003 * i
            with contextlib.suppress(TemplateLimitError):
                assert limit.run(partial(busy, seconds)) == seconds
            busy(0.001)  # where what is raised too late would be raised

    def watched():
        try:
            work()
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=watched) for _ in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not wrong
    assert not limit._renderings


def test_waiting_is_not_counted(monkeypatch):
    """A stopped or starved process is not at fault."""
    monkeypatch.setattr(deadline, "SECONDS", 0.05)
    monkeypatch.setattr(deadline, "_POLL", 0.01)
    assert Deadline().run(lambda: time.sleep(0.3)) is None
