"""Answers that must be JSON, of a model that knows nothing of it."""

import json

import pytest

from folders import save_model
from surefoot.data.text.templates import bundled
from tiny_tokenizers import tokenizer

from .running import running

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")
CHAT = "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "pick", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "other", "parameters": SCHEMA}},
]
ASKED = [{"role": "user", "content": "Hi"}]
SAMPLED = {"messages": ASKED, "temperature": 1, "top_p": 0.9, "n": 4, "max_tokens": 400}
SHORT = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    folder = tmp_path_factory.mktemp("forced")
    long = {"max_position_embeddings": 2048}
    save_model(folder / "base", template=bundled()["chatml"].source, **long)
    with running(folder / "base") as client:
        yield client


def test_a_response_follows_its_schema(client):
    found = client.ok(CHAT, **SAMPLED, seed=1, response_format=SHORT)
    done = [one for one in found["choices"] if one["finish_reason"] == "stop"]
    assert done
    for choice in done:
        jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
    free = client.ok(CHAT, **SAMPLED, seed=1)
    assert free["choices"][0]["message"]["content"][:1] != "{"


def test_a_call_is_read_from_a_response_and_from_its_stream(tmp_path):
    """In the syntax of Llama 3 a call is JSON, which the request lets the model write alone."""
    long = {"max_position_embeddings": 2048}
    save_model(tmp_path / "base", template=bundled()["llama3"].source, **long)
    call = {"name": {"const": "pick"}, "parameters": SCHEMA}
    schema = {**SCHEMA, "properties": call, "required": ["name", "parameters"]}
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    body = {**SAMPLED, "seed": 2, "tools": TOOLS, "response_format": form}
    with running(tmp_path / "base") as client:
        whole = client.ok(CHAT, **body)
        done = [one for one in whole["choices"] if one["finish_reason"] == "tool_calls"]
        assert done
        for one in done:
            (made,) = one["message"]["tool_calls"]
            assert made["function"]["name"] == "pick"
            jsonschema.validate(json.loads(made["function"]["arguments"]), SCHEMA)
            assert one["message"]["content"] is None
        deltas = [
            part["function"]
            for chunk in client.chunks(CHAT, **body)
            for one in chunk["choices"]
            if one["index"] == done[0]["index"]
            for part in one["delta"].get("tool_calls", [])
        ]
    assert deltas == [done[0]["message"]["tool_calls"][0]["function"]]


@pytest.mark.parametrize(
    "forced",
    [
        {"response_format": SHORT},
        {"response_format": {"type": "json_object"}},
    ],
)
def test_a_forced_answer_ends_though_the_model_writes_white_space_wherever_it_may(forced, client):
    known = tokenizer()
    (brace,) = known.encode("}", add_special_tokens=False)
    white = {known.encode(one, add_special_tokens=False)[0]: 100 for one in " \n\t\r"}
    body = {**SAMPLED, **forced, "max_tokens": 150, "seed": 1}
    found = client.ok(CHAT, **body, logit_bias={**white, brace: 90})
    for choice in found["choices"]:
        assert choice["finish_reason"] == "stop"
        json.loads(choice["message"]["content"])


def test_what_clients_send_by_habit_is_accepted(client):
    body = {"messages": ASKED, "max_tokens": 1, "modalities": ["text"], "tool_choice": "none"}
    assert client.ok(CHAT, **body)["choices"]
    options = {"include_obfuscation": False, "include_usage": True}
    assert "usage" in client.chunks(CHAT, **body, stream_options=options)[-1]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            {"tool_choice": "yes"},
            "tool_choice: Input should be 'none' or 'auto'",
        ),
        ({"tool_choice": "auto"}, "tool_choice: it needs tools"),
        ({"top_logprobs": 2}, "top_logprobs: it needs logprobs: true"),
        ({"stream_options": {"include_usage": True}}, "stream_options: it needs stream: true"),
        (
            {"max_completion_tokens": 2},
            "max_completion_tokens: it and max_tokens exclude each other; send one of them",
        ),
        ({"stop": 3}, "stop: Input should be a valid string, or Input should be a valid list"),
        ({"modalities": ["audio"]}, "modalities.0: Input should be 'text'"),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation: Input should be False",
        ),
        ({"messages": [{"content": 7}, 3]}, "messages.1: Input should be a valid dictionary"),
        ({"messages": None}, "messages: Input should be a valid list"),
    ],
)
def test_an_error_names_the_parameter_and_what_it_may_be(body, said, client):
    status, found = client.post(CHAT, **{"messages": ASKED, "max_tokens": 2, **body})
    assert (status, found["error"]["message"]) == (400, said)
    assert said.startswith(f"{found['error']['param']}: ")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 7}}}},
            "response_format",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools"),
    ],
)
def test_what_cannot_be_followed_is_refused(body, param, client):
    status, found = client.post(CHAT, messages=ASKED, max_tokens=2, **body)
    assert status == 400, found
    assert found["error"]["param"] == param, found
