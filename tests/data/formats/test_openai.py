"""Messages as OpenAI's API and fine-tuning files have them."""

import json

import pytest

from surefoot.data.example import Message
from surefoot.data.rows.formats.turns import OpenAI
from surefoot.errors import DataError

FUNCTION = {"name": "weather", "parameters": {"type": "object"}}


def chat(*messages, **columns):
    return {"messages": list(messages), **columns}


def said(role, content, **more):
    return {"role": role, "content": content, **more}


def called(arguments, **more):
    function = {"name": "weather", "arguments": arguments}
    return {"id": "call_1", "type": "function", "function": function, **more}


def test_nothing_is_added_to_a_conversation():
    example = OpenAI().read(chat(said("user", "Hi"), said("assistant", "Hello")))
    assert example.messages == (Message("user", "Hi"), Message("assistant", "Hello"))
    assert example.tools == ()


@pytest.mark.parametrize("arguments", ['{"city": "Paris"}', {"city": "Paris"}])
@pytest.mark.parametrize("content", [None, "", "Let me look."])
def test_tool_calls_keep_what_was_said(arguments, content):
    row = chat(
        said("user", "Weather?"),
        said("assistant", content, tool_calls=[called(arguments)]),
        said("tool", "blue", tool_call_id="call_1"),
        said("assistant", "Blue."),
        tools=[{"type": "function", "function": FUNCTION}],
    )
    example = OpenAI().read(row)
    call = {"name": "weather", "arguments": {"city": "Paris"}, "id": "call_1"}
    assert example.messages[1] == Message("assistant", content or "", (call,))
    assert example.messages[2] == Message("tool", "blue", fields={"tool_call_id": "call_1"})
    assert example.tools == (FUNCTION,)


def test_several_tool_results_stay_apart():
    calls = [called("{}"), called("{}")]
    row = chat(said("assistant", None, tool_calls=calls), said("tool", "a"), said("tool", "b"))
    assert [m.role for m in OpenAI().read(row).messages] == ["assistant", "tool", "tool"]
    assert len(OpenAI().read(row).messages[0].tool_calls) == 2


def test_nulls_that_columnar_files_fill_in_are_nothing():
    row = chat(
        {"role": "user", "content": "a", "tool_calls": None, "weight": None},
        {"role": "assistant", "content": "b", "tool_calls": [], "reasoning_content": None},
        tools=None,
        system=None,
    )
    assert OpenAI().read(row).messages == (Message("user", "a"), Message("assistant", "b"))


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_a_thought_has_a_key_of_its_own(key):
    row = chat(said("user", "a"), said("assistant", "b", **{key: "Hm."}))
    assert OpenAI().read(row).messages[1] == Message("assistant", "b", reasoning="Hm.")
    call = said("assistant", None, tool_calls=[called("{}")], **{key: "Hm."})
    assert OpenAI().read(chat(said("user", "a"), call)).messages[1].reasoning == "Hm."


def test_newer_and_older_role_names():
    row = chat(said("developer", "Be brief."), said("user", "a"), said("function", "3"))
    assert [m.role for m in OpenAI().read(row).messages] == ["system", "user", "tool"]


def test_tags_that_a_dataset_renames_win_over_other_names():
    row = chat(said("function", "a"), said("assistant", "b"))
    assert OpenAI(user_tag="function").read(row).messages[0].role == "user"


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "Hi "}, {"type": "text", "text": "there"}]
    assert OpenAI().read(chat(said("user", parts))).messages[0].content == "Hi there"


def test_a_weight_of_zero_is_not_learnt():
    row = chat(said("user", "a"), said("assistant", "b", weight=0), said("assistant", "c"))
    assert [m.learn for m in OpenAI().read(row).messages] == [None, False, None]


def test_tool_calls_may_be_json_text():
    row = chat(said("assistant", "", tool_calls=json.dumps([called("{}")])))
    call = {"id": "call_1", "name": "weather", "arguments": {}}
    assert OpenAI().read(row).messages[0].tool_calls == (call,)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (said("assistant", None), "turn 1: 'content': expected text, got null"),
        (said("asistant", "a"), r"unknown role 'asistant' \(did you mean assistant\?\)"),
        (said("user", "a", tool_calls=[called("{}")]), "'tool_calls' in a turn of the user"),
        (said("assistant", "", tool_calls=[called("{")]), "arguments: not valid JSON"),
        (said("assistant", "", tool_calls=["f"]), "expected a call with name and arguments"),
        (said("user", "a", reasoning_content="hm"), "'reasoning_content' in a turn of the user"),
        (said("assistant", "a", reasoning="hm", thinking="no"), "are different thoughts"),
        (said("assistant", "a", thinking=["hm"]), "'thinking': expected text, got list"),
        ({"role": "user"}, r"turn 1: no key 'content' \(keys found: role\)"),
        (
            said("user", [{"type": "text", "txt": "a"}]),
            "'content': a text part without 'text', got",
        ),
        (said("user", [{"type": "text", "text": None}]), "'content': a text part without 'text'"),
        (said("user", [{"type": "image_url"}]), "only text parts are supported, got dict"),
        (said("user", [{"type": "text", "text": 1}]), "expected text, got int 1"),
    ],
)
def test_a_bad_message_says_where_and_why(message, reason):
    with pytest.raises(DataError, match=reason):
        OpenAI().read(chat(message))


def test_ranking_answers_are_messages():
    row = chat(said("user", "a"), chosen=said("assistant", "y"), rejected=[said("assistant", "n")])
    example = OpenAI(ranking=True).read(row)
    assert (example.chosen, example.rejected) == (
        Message("assistant", "y"),
        Message("assistant", "n"),
    )
