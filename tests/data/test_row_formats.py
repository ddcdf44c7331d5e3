"""One row to one example, in every format."""

import json

import pytest

from surefoot.data.example import Message
from surefoot.data.rows.formats._alpaca import Alpaca
from surefoot.data.rows.formats._turns import OpenAI, ShareGPT
from surefoot.data.rows.rows import parse_row
from surefoot.errors import DataError

ROW = {"instruction": "Add the numbers.", "input": "2 3", "output": "5"}
QUESTION = {"instruction": "a", "output": "b"}
FUNCTION = {"name": "weather", "parameters": {"type": "object"}}
CALL = {"name": "weather", "arguments": {"city": "Paris"}}
SCHEMA = {"name": "f", "parameters": {}}
SYSTEM, USER, ANSWER = (
    Message("system", "Be kind."),
    Message("user", "a"),
    Message("assistant", "b"),
)


def said(role, content, **more):
    return {"role": role, "content": content, **more}


def chat(*messages, **columns):
    return {"messages": list(messages), **columns}


def called(arguments, **more):
    function = {"name": "weather", "arguments": arguments}
    return {"id": "call_1", "type": "function", "function": function, **more}


def turns(*pairs, **columns):
    return {"conversations": [{"from": role, "value": value} for role, value in pairs], **columns}


ASKED = turns(("human", "a"), ("gpt", "b"))
TAGS = {"role_tag": "who", "content_tag": "what", "user_tag": "me", "assistant_tag": "you"}


@pytest.mark.parametrize(
    ("form", "row", "messages"),
    [
        (Alpaca(), ROW, [Message("user", "Add the numbers.\n2 3"), Message("assistant", "5")]),
        (Alpaca(), {**QUESTION, "input": ""}, [USER, ANSWER]),
        (Alpaca(), {**QUESTION, "input": None}, [USER, ANSWER]),
        (Alpaca(), {**QUESTION, "instruction": "", "input": "a"}, [USER, ANSWER]),
        (Alpaca(), {**QUESTION, "system": ""}, [USER, ANSWER]),
        (Alpaca(), {**QUESTION, "output": ""}, [USER, Message("assistant", "")]),
        (Alpaca(system=None), {**QUESTION, "system": "metadata, no message"}, [USER, ANSWER]),
        (
            Alpaca(),
            {**QUESTION, "system": "Be kind.", "history": [["a", "b"], ["a", "b"]]},
            [SYSTEM, *[USER, ANSWER] * 3],
        ),
        (
            Alpaca(reasoning="why"),
            {**QUESTION, "reasoning_content": "Hm.", "why": "So."},
            [USER, Message("assistant", "b", reasoning="So.")],
        ),
        (
            Alpaca(),
            {**QUESTION, "reasoning_content": "Hm."},
            [USER, Message("assistant", "b", reasoning="Hm.")],
        ),
        (Alpaca(reasoning=None), {**QUESTION, "reasoning_content": "Hm."}, [USER, ANSWER]),
        (OpenAI(), chat(said("user", "a"), said("assistant", "b")), [USER, ANSWER]),
        (  # nulls that columnar files fill in are nothing
            OpenAI(),
            chat(
                said("user", "a", tool_calls=None, weight=None),
                said("assistant", "b", tool_calls=[], reasoning_content=None),
                tools=None,
                system=None,
            ),
            [USER, ANSWER],
        ),
        (
            OpenAI(),
            chat(said("developer", "Be kind."), said("user", "a"), said("function", "3")),
            [SYSTEM, USER, Message("tool", "3")],
        ),
        (
            OpenAI(user_tag="function"),
            chat(said("function", "a"), said("assistant", "b")),
            [USER, ANSWER],
        ),
        (
            OpenAI(),
            chat(said("user", [{"type": "text", "text": t} for t in ("Hi ", "there")])),
            [Message("user", "Hi there")],
        ),
        (
            ShareGPT(),
            turns(("system", "Be kind."), ("human", "a"), ("gpt", "b")),
            [SYSTEM, USER, ANSWER],
        ),
        (  # the roles need not alternate
            ShareGPT(),
            turns(("gpt", "b"), ("human", "a"), ("human", "a"), ("gpt", "b")),
            [ANSWER, USER, USER, ANSWER],
        ),
        (ShareGPT(), {**ASKED, "system": "Be kind."}, [SYSTEM, USER, ANSWER]),
        (  # the same system message twice is one
            ShareGPT(),
            turns(("system", "Be kind."), ("human", "a"), system="Be kind."),
            [SYSTEM, USER],
        ),
        (
            ShareGPT(messages="chat", **TAGS),
            {"chat": [{"who": "me", "what": "a"}, {"who": "you", "what": "b"}]},
            [USER, ANSWER],
        ),
        (
            ShareGPT(),
            {"conversations": json.dumps(ASKED["conversations"])},
            [USER, ANSWER],
        ),
    ],
)
def test_a_row_becomes_its_messages(form, row, messages):
    example = form.read(row)
    assert example.messages == tuple(messages)
    assert example.text is None
    assert example.tools == ()


def test_a_row_of_only_a_prompt_is_a_text():
    example = Alpaca(prompt="text").read({"text": "Once upon a time", "url": "http://a"})
    assert example.text == "Once upon a time"
    assert example.messages == (Message("user", "Once upon a time"),)


GOOD, BAD = Message("assistant", "yes"), Message("assistant", "no")


@pytest.mark.parametrize(
    ("form", "row"),
    [
        (Alpaca, {"instruction": "a", "chosen": "yes", "rejected": "no"}),
        (
            OpenAI,
            chat(
                said("user", "a"),
                chosen=said("assistant", "yes"),
                rejected=[said("assistant", "no")],
            ),
        ),
        (ShareGPT, turns(("human", "a"), chosen="yes", rejected={"from": "gpt", "value": "no"})),
    ],
)
def test_ranking_rows_have_two_answers_after_the_question(form, row):
    example = form(ranking=True).read(row)
    assert (example.messages, example.chosen, example.rejected) == ((USER,), GOOD, BAD)


@pytest.mark.parametrize(
    ("value", "label"), [(True, True), (False, False), ("true", True), ("False", False), (1, True)]
)
def test_a_kto_tag_says_whether_the_answer_is_desirable(value, label):
    assert Alpaca(kto_tag="good").read({**ROW, "good": value}).label is label
    assert ShareGPT(kto_tag="good").read({**ASKED, "good": value}).label is label


def test_tools_may_be_a_list_or_its_json():
    for tools in ([SCHEMA], json.dumps([SCHEMA])):
        assert Alpaca().read({**ROW, "tools": tools}).tools == (SCHEMA,)


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_a_thought_has_a_key_of_its_own(key):
    row = chat(said("user", "a"), said("assistant", "b", **{key: "Hm."}))
    assert OpenAI().read(row).messages[1] == Message("assistant", "b", reasoning="Hm.")
    call = said("assistant", None, tool_calls=[called("{}")], **{key: "Hm."})
    assert OpenAI().read(chat(said("user", "a"), call)).messages[1].reasoning == "Hm."


# Calls


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
    assert example.messages[1] == Message("assistant", content or "", ({**CALL, "id": "call_1"},))
    assert example.messages[2] == Message("tool", "blue", fields={"tool_call_id": "call_1"})
    assert example.tools == (FUNCTION,)


@pytest.mark.parametrize("write", [list, json.dumps])
def test_several_calls_and_their_results_stay_apart(write):
    calls = write([called("{}"), called("{}")])
    row = chat(said("assistant", None, tool_calls=calls), said("tool", "a"), said("tool", "b"))
    assert [m.role for m in OpenAI().read(row).messages] == ["assistant", "tool", "tool"]
    call = {"id": "call_1", "name": "weather", "arguments": {}}
    assert OpenAI().read(row).messages[0].tool_calls == (call, call)


def test_function_calls_and_results_may_be_turns_of_their_own():
    row = turns(
        ("function_call", json.dumps(CALL)),
        ("observation", '{"sky": "blue"}'),
        tools=json.dumps([FUNCTION]),
    )
    example = ShareGPT().read(row)
    assert example.messages == (
        Message("assistant", "", (CALL,)),
        Message("tool", '{"sky": "blue"}'),
    )
    assert example.tools == (FUNCTION,)


THOUGHT = "<think>\nlet me see\n</think>\n\n"


@pytest.mark.parametrize(
    ("value", "content", "calls"),
    [
        (json.dumps([CALL, CALL]), "", (CALL, CALL)),
        (json.dumps([{"type": "function", "function": CALL}] * 2), "", (CALL, CALL)),
        (json.dumps([{**CALL, "arguments": '{"city": "Paris"}'}] * 2), "", (CALL, CALL)),
        (f"<tool_call>\n{json.dumps(CALL)}\n</tool_call>\n" * 2, "", (CALL, CALL)),
        (THOUGHT + json.dumps(CALL), THOUGHT, (CALL,)),
        *[
            (json.dumps({"name": "now", **none}), "", ({"name": "now", "arguments": {}},))
            for none in ({}, {"arguments": None}, {"arguments": ""})
        ],
    ],
)
def test_calls_in_one_turn_however_they_are_written(value, content, calls):
    example = ShareGPT().read(turns(("human", "a"), ("function_call", value)))
    assert example.messages[1] == Message("assistant", content, calls)


# Bad rows


RANKING, TAGGED = Alpaca(ranking=True), Alpaca(kto_tag="good")


@pytest.mark.parametrize(
    ("form", "row", "reason"),
    [
        *[
            (Alpaca(), {**ROW, name: value}, reason)
            for name, value, reason in [
                ("output", 5, "column 'output': expected text, got int 5"),
                ("instruction", ["a"], "'instruction': expected text, got list"),
                ("output", "\ud83d", "'output': half of a surrogate pair at character 0"),
                ("history", "hello", "column 'history': not valid JSON"),
                ("history", {"q": "a"}, r"expected a list of \[question, answer\]"),
                ("history", [["q"]], r"expected \[question, answer\], got list"),
                ("history", [["q", 1]], "column 'history': expected text, got int 1"),
                ("tools", "{", "column 'tools': not valid JSON"),
                ("tools", {"name": "f"}, "expected a list of function schemas"),
                ("tools", [{"nme": "f"}], "expected a function schema with a name"),
            ]
        ],
        (
            Alpaca(),
            {"instructon": "a", "output": "b"},
            r"no column 'instruction' \(columns found: instructon, o",
        ),
        (Alpaca(prompt="text"), {"text": ""}, "column 'text': the text is empty"),
        (RANKING, {"instruction": "a"}, "no column 'chosen'"),
        (RANKING, {"instruction": "a", "chosen": "b"}, "no column 'rejected'"),
        *[
            (TAGGED, {**ROW, "good": value}, "column 'good': expected true or false")
            for value in ("maybe", 2, 0.5, [True])
        ],
        (ShareGPT(), {}, "no column 'conversations'"),
        (ShareGPT(), turns(), "column 'conversations': expected a list of turns"),
        (ShareGPT(), {"conversations": {"from": "human"}}, "expected a list of turns, got dict"),
        (ShareGPT(), {"conversations": ["hi"]}, "turn 1: expected an object, got str 'hi'"),
        (
            ShareGPT(),
            turns(("human", "a"), ("gtp", "b")),
            r"turn 2: unknown role 'gtp' \(did you mean gpt",
        ),
        (ShareGPT(), turns((None, "a")), r"unknown role None \(expected one of human, gpt"),
        (ShareGPT(), {"conversations": [{"role": "a"}]}, r"no key 'from' \(keys found: role\)"),
        (ShareGPT(), turns(("human", None)), "turn 1: 'value': expected text, got null"),
        (ShareGPT(), turns(("human", 3)), "turn 1: 'value': expected text, got int 3"),
        *[
            (ShareGPT(), turns(("function_call", call)), reason)
            for call, reason in [
                ("{'name': 1}", "turn 1: not valid JSON"),
                ("[]", "turn 1: expected a function call"),
                ('{"nme": 1}', "turn 1: expected a call with name"),
                ('{"name": "f", "arguments": [1]}', "arguments as an object"),
                ('{"name": "f", "arguments": "{"}', "arguments: not valid JSON"),
            ]
        ],
        (ShareGPT(), {**ASKED, "tools": "[1]"}, "column 'tools': expected a function schema"),
        (ShareGPT(), {**ASKED, "tools": "[" * 100_000}, "not valid JSON"),
        (
            ShareGPT(),
            {"conversations": [{"from": "gpt", "value": "", "weight": 0.5}]},
            r"'weight': float 0\.5 is not read; write \"weight\": 0 to mask",
        ),
        (
            ShareGPT(),
            turns(("system", "Be kind."), ("human", "a"), system="Be brief."),
            "two different system messages",
        ),
        *[
            (ShareGPT(ranking=True), {**ASKED, "chosen": chosen, "rejected": "no"}, reason)
            for chosen, reason in [
                (None, "no value in the column 'chosen'"),
                ({"from": "human", "value": "a"}, "'chosen': expected a response, got a turn"),
                ([{"from": "gpt", "value": "a"}] * 2, "'chosen': expected an object, got list"),
            ]
        ],
        *[
            (OpenAI(), chat(message), reason)
            for message, reason in [
                (said("assistant", None), "turn 1: 'content': expected text, got null"),
                (said("user", "a", tool_calls=[called("{}")]), "'tool_calls' in a turn of the us"),
                (said("assistant", "", tool_calls=[called("{")]), "arguments: not valid JSON"),
                (said("assistant", "", tool_calls=["f"]), "a call with name and arguments"),
                (said("user", "a", reasoning_content="hm"), "'reasoning_content' in a turn of th"),
                (said("assistant", "a", reasoning="hm", thinking="no"), "are different thoughts"),
                (said("assistant", "a", thinking=["hm"]), "'thinking': expected text, got list"),
                ({"role": "user"}, r"turn 1: no key 'content' \(keys found: role\)"),
                (said("user", [{"type": "text", "txt": "a"}]), "a text part without 'text', got"),
                (said("user", [{"type": "text", "text": None}]), "a text part without 'text'"),
                (
                    said("user", [{"type": "video_url"}]),
                    "only parts with text or a picture are suppor",
                ),
                (said("user", [{"type": "image_url"}]), "has 0 pictures, and the texts have 1 pl"),
                (said("user", [{"type": "text", "text": 1}]), "expected text, got int 1"),
            ]
        ],
    ],
)
def test_a_bad_row_says_where_and_why(form, row, reason):
    with pytest.raises(DataError, match=reason):
        form.read(row)


class Array:
    """As numpy's: no value of its own is equal to itself, and none is true or false."""

    def __ne__(self, _):
        raise ValueError("the truth of an array is ambiguous")


def test_nan_is_a_missing_value_and_nothing_else_is_compared():
    """pandas writes NaN for what is missing; a comparison of pictures reads all their pixels."""
    row = {"prompt": "Hi", "response": "Ho", "system": float("nan"), "other": Array()}
    example = parse_row(Alpaca(prompt="prompt", response="response"), row)
    assert [message.role for message in example.messages] == ["user", "assistant"]
    assert example.columns["system"] is None and example.columns["other"] is row["other"]
