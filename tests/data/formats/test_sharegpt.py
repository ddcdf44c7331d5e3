"""Turns with a role and a value, function calls as turns of their own."""

import json

import pytest

from surefoot.data.example import Message
from surefoot.data.rows.formats.turns import ShareGPT
from surefoot.errors import DataError

CALL = {"name": "weather", "arguments": {"city": "Paris"}}


def turns(*pairs, **columns):
    return {"conversations": [{"from": role, "value": value} for role, value in pairs], **columns}


def test_turns_become_messages():
    example = ShareGPT().read(turns(("system", "Be kind."), ("human", "Hi"), ("gpt", "Hello")))
    assert example.messages == (
        Message("system", "Be kind."),
        Message("user", "Hi"),
        Message("assistant", "Hello"),
    )


def test_the_roles_need_not_alternate():
    example = ShareGPT().read(turns(("gpt", "Hi"), ("human", "a"), ("human", "b"), ("gpt", "c")))
    assert [m.role for m in example.messages] == ["assistant", "user", "user", "assistant"]


def test_function_calls_and_results():
    row = turns(
        ("human", "Weather?"),
        ("function_call", json.dumps(CALL)),
        ("observation", '{"sky": "blue"}'),
        ("gpt", "Blue."),
        tools=json.dumps([{"name": "weather", "parameters": {"type": "object"}}]),
    )
    example = ShareGPT().read(row)
    assert example.messages[1] == Message("assistant", "", (CALL,))
    assert example.messages[2] == Message("tool", '{"sky": "blue"}')
    assert example.tools == ({"name": "weather", "parameters": {"type": "object"}},)


@pytest.mark.parametrize(
    "value",
    [
        json.dumps([CALL, CALL]),
        json.dumps([{"type": "function", "function": CALL}] * 2),
        json.dumps([{"name": "weather", "arguments": '{"city": "Paris"}'}] * 2),
        "\n".join(f"<tool_call>\n{json.dumps(CALL)}\n</tool_call>" for _ in range(2)),
    ],
)
def test_several_calls_in_one_turn_however_they_are_written(value):
    example = ShareGPT().read(turns(("human", "a"), ("function_call", value)))
    assert example.messages[1] == Message("assistant", "", (CALL, CALL))


def test_a_thought_before_a_call_is_kept():
    value = "<think>\nlet me see\n</think>\n\n" + json.dumps(CALL)
    example = ShareGPT().read(turns(("human", "a"), ("function_call", value)))
    assert example.messages[1].content == "<think>\nlet me see\n</think>\n\n"
    assert example.messages[1].tool_calls == (CALL,)


@pytest.mark.parametrize("arguments", [{}, {"arguments": None}, {"arguments": ""}])
def test_a_call_without_arguments_has_none(arguments):
    value = json.dumps({"name": "now", **arguments})
    example = ShareGPT().read(turns(("human", "a"), ("function_call", value)))
    assert example.messages[1].tool_calls == ({"name": "now", "arguments": {}},)


def test_the_system_column_comes_first():
    messages = ShareGPT().read(turns(("human", "a"), ("gpt", "b"), system="Be kind.")).messages
    assert messages[0] == Message("system", "Be kind.")


def test_the_same_system_message_twice_is_one():
    row = turns(("system", "Be kind."), ("human", "a"), system="Be kind.")
    assert [m.role for m in ShareGPT().read(row).messages] == ["system", "user"]


def test_two_different_system_messages_are_a_bad_row():
    row = turns(("system", "Be kind."), ("human", "a"), system="Be brief.")
    with pytest.raises(DataError, match="two different system messages"):
        ShareGPT().read(row)


def test_tags_rename_keys_and_roles():
    data_format = ShareGPT(
        messages="chat", role_tag="who", content_tag="what", user_tag="me", assistant_tag="you"
    )
    row = {"chat": [{"who": "me", "what": "a"}, {"who": "you", "what": "b"}]}
    assert data_format.read(row).messages == (Message("user", "a"), Message("assistant", "b"))


def test_conversations_may_be_written_as_json_text():
    row = {"conversations": json.dumps(turns(("human", "a"))["conversations"])}
    assert ShareGPT().read(row).messages == (Message("user", "a"),)


@pytest.mark.parametrize("wrap", [lambda t: t, lambda t: [t], lambda t: t["value"]])
def test_ranking_answers_may_be_turns_or_text(wrap):
    good, bad = {"from": "gpt", "value": "yes"}, {"from": "gpt", "value": "no"}
    row = turns(("human", "a"), chosen=wrap(good), rejected=wrap(bad))
    example = ShareGPT(ranking=True).read(row)
    assert example.messages == (Message("user", "a"),)
    assert example.chosen == Message("assistant", "yes")
    assert example.rejected == Message("assistant", "no")


def test_a_kto_tag_is_a_label():
    row = turns(("human", "a"), ("gpt", "b"), label=False)
    assert ShareGPT(kto_tag="label").read(row).label is False


def test_a_weight_says_whether_a_turn_is_learnt():
    row = turns(("human", "a"), ("gpt", "b"), ("gpt", "c"))
    row["conversations"][1]["weight"] = 0
    row["conversations"][2]["weight"] = 1
    assert [m.learn for m in ShareGPT().read(row).messages] == [None, False, True]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({}, "no column 'conversations'"),
        ({"conversations": []}, "column 'conversations': expected a list of turns"),
        ({"conversations": {"from": "human"}}, "expected a list of turns, got dict"),
        ({"conversations": ["hi"]}, "turn 1: expected an object, got str 'hi'"),
        (turns(("human", "a"), ("gtp", "b")), r"turn 2: unknown role 'gtp' \(did you mean gpt"),
        (turns((None, "a")), r"turn 1: unknown role None \(expected one of human, gpt"),
        (turns(("zebra", "a")), r"turn 1: unknown role 'zebra' \(expected one of human, gpt"),
        ({"conversations": [{"role": "human"}]}, r"turn 1: no key 'from' \(keys found: role\)"),
        (turns(("human", None)), "turn 1: 'value': expected text, got null"),
        (turns(("human", 3)), "turn 1: 'value': expected text, got int 3"),
        (turns(("function_call", "{'name': 1}")), "turn 1: not valid JSON"),
        (turns(("function_call", "[]")), "turn 1: expected a function call"),
        (turns(("function_call", '{"nme": "f"}')), "turn 1: expected a call with name"),
        (turns(("function_call", '{"name": "f", "arguments": [1]}')), "arguments as an object"),
        (turns(("function_call", '{"name": "f", "arguments": "{"}')), "arguments: not valid JSON"),
        (turns(("human", "a"), tools="[1]"), "column 'tools': expected a function schema"),
        (
            {"conversations": [{"from": "gpt", "value": "", "weight": 0.5}]},
            r"'weight': float 0\.5 is not read; write \"weight\": 0 to mask",
        ),
    ],
)
def test_a_bad_row_says_where_and_why(row, reason):
    with pytest.raises(DataError, match=reason):
        ShareGPT().read(row)


@pytest.mark.parametrize(
    ("chosen", "reason"),
    [
        (None, "no value in the column 'chosen'"),
        (
            {"from": "human", "value": "a"},
            "column 'chosen': expected a response, got a turn",
        ),
        ([{"from": "gpt", "value": "a"}] * 2, "column 'chosen': expected an object, got list"),
    ],
)
def test_a_ranking_answer_must_be_one(chosen, reason):
    row = turns(("human", "a"), chosen=chosen, rejected="no")
    with pytest.raises(DataError, match=reason):
        ShareGPT(ranking=True).read(row)


def test_deep_brackets_are_a_bad_row_not_a_crash():
    with pytest.raises(DataError, match="not valid JSON"):
        ShareGPT().read(turns(("human", "a"), tools="[" * 100_000))
