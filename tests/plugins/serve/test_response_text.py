"""Thoughts, texts and calls of a response, however its text is cut into pieces."""

import itertools
import random

import pytest

from surefoot.data.text.templates.render import USUAL
from surefoot.plugins.serve.response_text import ResponseText

TOOLS = [
    {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
]
CALL = {"name": "add", "arguments": {"a": 2}}
QWEN = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
GEMMA = ("<|channel>thought\n", "<channel|>")


def parts(text, cuts, **options):
    """What the pieces say together."""
    parser = ResponseText(**{"words": USUAL, **options})
    found, calls = {}, []
    bounds = [0, *cuts, len(text)]
    for number, (start, end) in enumerate(itertools.pairwise(bounds)):
        is_last = number == len(bounds) - 2
        for piece in parser.push(text[start:end], is_last=is_last):
            if piece.call is not None:
                calls.append(piece.call)
            else:
                found[piece.kind] = found.get(piece.kind, "") + piece.text
    return found.get("reasoning_content"), found.get("content"), calls


WITH_TOOLS = {"syntax": "qwen", "tools": TOOLS}
CASES = [
    ("Hello  \n", {}, (None, "Hello  \n", [])),
    (" <thin air", {}, (None, " <thin air", [])),
    ("<think>\nWhy?\n\n</think>\n\n4 < 5", {}, ("Why?", "4 < 5", [])),
    ("<think>\n\n</think>\n\nYes", {}, (None, "Yes", [])),
    ("So </thin\n</think>\nYes", {"is_thinking": True}, ("So </thin", "Yes", [])),
    ("endless </thi", {"is_thinking": True}, ("endless </thi", None, [])),
    ("<|channel>thought\nA<channel|>B", {"words": GEMMA}, ("A", "B", [])),
    (f"I add.\n{QWEN}", WITH_TOOLS, (None, "I add.", [CALL])),
    (f"{QWEN}\n{QWEN}", WITH_TOOLS, (None, None, [CALL, CALL])),
    (f"<think>\nHm\n</think>\n\n{QWEN}", WITH_TOOLS, ("Hm", None, [CALL])),
    (f"<think>\n{QWEN}\n</think>\n\nNo", WITH_TOOLS, (QWEN, "No", [])),
    (f"x {QWEN[:30]}", WITH_TOOLS, (None, f"x {QWEN[:30]}", [])),
    ("a <tool  <tool_cal \n", WITH_TOOLS, (None, "a <tool  <tool_cal \n", [])),
    (f"I add.\n{QWEN}", {}, (None, f"I add.\n{QWEN}", [])),
    (
        '{"name": "add", "parameters": {"a": 2}}',
        {"syntax": "llama3", "tools": TOOLS},
        (None, None, [CALL]),
    ),
    ("Plain {text}", {"syntax": "llama3", "tools": TOOLS}, (None, "Plain {text}", [])),
    ('{"no": "call"}', {"syntax": "llama3", "tools": TOOLS}, (None, '{"no": "call"}', [])),
    ('add\n{"a": 2}', {"syntax": "glm4", "tools": TOOLS}, (None, None, [CALL])),
    ("Only text", {"syntax": "glm4", "tools": TOOLS}, (None, "Only text", [])),
]


@pytest.mark.parametrize(("text", "options", "expected"), CASES)
def test_it_says_the_same_in_one_piece_and_in_many(text, options, expected):
    assert parts(text, [], **options) == expected
    assert parts(text, range(1, len(text)), **options) == expected
    numbers = random.Random(0)
    for _ in range(20):
        cuts = sorted(numbers.sample(range(1, len(text)), min(4, len(text) - 1)))
        assert parts(text, cuts, **options) == expected


def test_text_is_shown_as_soon_as_it_can_be_no_mark():
    parser = ResponseText(USUAL, **WITH_TOOLS)
    shown = ["".join(one.text for one in parser.push(text)) for text in ("I", " add", " <t", "a>")]
    assert shown == ["I", " add", "", " <ta>"]
