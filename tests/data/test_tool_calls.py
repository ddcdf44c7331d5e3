"""Tool calls: what each syntax writes is read back as it was."""

import json
import time
from dataclasses import replace

import pytest

import tiny_tokenizers
from surefoot.data.example import Message
from surefoot.data.rows.formats._turns import OpenAI
from surefoot.data.section import DataSection
from surefoot.data.text.codec import Codec
from surefoot.data.text.families import TOOLS, families
from surefoot.data.text.templates import bundled, find_bundled, load_template
from surefoot.data.text.templates.render import Renderer, message_dicts, tool_dicts
from surefoot.data.text.tool_calls import SYNTAXES, parse_tool_calls, syntax_of

VALUES = {
    "city": 'Paris, {"x": 1} "quoted"\nand more',
    "days": [1, 2.5],
    "deep": {"a": [True, None, "b: c, {d:e}"]},
    "code": "12",
    "none": None,
    "empty": "",
}
TYPES = {key: {"type": "string"} for key in ("city", "code", "empty")}
TYPES |= {"days": {"type": "array"}, "deep": {"type": "object"}, "none": {"type": "null"}}
TOOL = {"name": "get_weather", "parameters": {"type": "object", "properties": TYPES}}
CALLS = ({"name": "get_weather", "arguments": VALUES}, {"name": "stop", "arguments": {}})
BY_SYNTAX = {family.tools: name for name, family in families().items()}
NAMES = [*BY_SYNTAX.values(), *bundled()]


def written(name, calls, content=""):
    """What a template makes of a response with calls."""
    renderer = Renderer(find_bundled(name).source, tiny_tokenizers.tokenizer())
    said = Message("assistant", content, calls)
    dicts = message_dicts([Message("user", "Question"), said], renderer)
    text = renderer.render(dicts, tool_dicts([TOOL]))
    prompt = renderer.render(dicts[:1], tool_dicts([TOOL]), prompt=True)
    return text.removeprefix(prompt)


def ended(name, text):
    """A response without what ends its turn."""
    for stop in (*find_bundled(name).stop, "</s>"):
        text = text.rstrip("\n").removesuffix(stop)
    return text


def test_every_syntax_is_written_and_read():
    assert {path.stem for path in TOOLS.glob("*.part")} == set(SYNTAXES)
    assert set(BY_SYNTAX) >= set(SYNTAXES) - {"mistral_small"}


@pytest.mark.parametrize("name", NAMES)
def test_calls_are_read_back_as_they_were_written(name):
    source = find_bundled(name).source
    calls = CALLS[:1] if syntax_of(source) == "glm4" else CALLS
    text = ended(name, written(name, calls))
    found = parse_tool_calls(text, syntax_of(source), [TOOL])
    assert json.dumps(found.calls, sort_keys=True) == json.dumps(calls, sort_keys=True)
    assert not found.broken
    assert "get_weather" not in found.text


@pytest.mark.parametrize("name", NAMES)
def test_the_syntax_of_a_template_is_found(name):
    family = families().get(name)
    expected = (
        {"ling": "qwen", "phi4_mini": "default"}.get(family.tools, family.tools) if family else None
    )
    own = {"llama3": "llama3", "mistral": "mistral"}
    assert syntax_of(find_bundled(name).source) == (expected or own.get(name, "qwen"))


@pytest.mark.parametrize("syntax", sorted(set(SYNTAXES) - {"glm4"}))
def test_a_response_is_read_without_the_name_of_its_syntax(syntax):
    name = BY_SYNTAX[syntax]
    text = ended(name, written(name, CALLS[:1]))
    assert parse_tool_calls(text, tools=[TOOL]).calls == CALLS[:1]


@pytest.mark.parametrize(
    ("syntax", "text"),
    [
        ("qwen", '<tool_call>\n{"name": "f", "arguments": {"a": \n</tool_call>'),
        ("qwen", '<tool_call>\n{"name": "f", "argu'),
        ("qwen", '<tool_call>\n{"arguments": {}}\n</tool_call>'),
        ("qwen", '<tool_call>["a"]</tool_call>'),
        ("lfm2", "<|tool_call_start|>[f(open('x'))]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[f(1)]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>f(a=" + "(" * 5000 + "<|tool_call_end|>"),
        ("mistral", '[TOOL_CALLS] [{"name": "f"}]'),
        ("default", "Action: f\nAction Input: none"),
        ("minimax2", "<minimax:tool_call>f()</minimax:tool_call>"),
        ("gemma4", '<|tool_call>call:f{a:<|"|>b}<tool_call|>'),
        ("qwen3_5", "<tool_call>\n<function=f>\n<parameter=a>\n1"),
    ],
)
def test_a_call_that_cannot_be_read_is_kept_as_text(syntax, text):
    found = parse_tool_calls("Well. " + text, syntax)
    assert (found.calls, found.broken, found.text) == ((), (text,), "Well.")


@pytest.mark.parametrize("syntax", SYNTAXES)
def test_a_response_without_a_call_is_unchanged(syntax):
    for text in (
        "Just words.\n",
        "<think>\n<tool_call>?\n</think>\n\nNo.",
        "",
        '{"a": 1}',
        "[1, 2]",
    ):
        found = parse_tool_calls(text, syntax)
        assert (found.text, found.calls, found.broken) == (text, (), ())


def test_the_words_beside_a_call_are_kept():
    text = 'I look.\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    found = parse_tool_calls(text)
    assert (found.text, found.calls) == ("I look.", ({"name": "f", "arguments": {}},))


def test_without_a_schema_a_value_is_json_if_it_can_be():
    text = "<tool_call>\n<function=f>\n<parameter=a>\n12\n</parameter>\n</function>\n</tool_call>"
    assert parse_tool_calls(text).calls[0]["arguments"] == {"a": 12}
    known = {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}}
    assert parse_tool_calls(text, tools=[known]).calls[0]["arguments"] == {"a": "12"}


@pytest.mark.parametrize("syntax", [None, *SYNTAXES])
def test_a_response_that_repeats_itself_is_read_quickly(syntax):
    start = time.process_time()
    words = ("Action:", "<tool_call>", '"name":', "{", " ", "<|tool_call_start|>[")
    for word in (*words, "<|tool_call>call:", "[TOOL_CALLS]", "<function=", "<parameter="):
        parse_tool_calls(word * 5000, syntax)
    assert time.process_time() - start < 2


# What a model's own template reads of a message

KIMI = """{%- if tools %}{{- tools | tojson }}{%- endif %}{%- for m in messages %}
    {{- '<|im_start|>' + (m.name or m.role) + ' ' + (m.tool_call_id or '') + '\n' + m.content }}
    {%- for c in m.tool_calls or [] %}
        {{- '<call ' + (c.id or '') + ' ' + c.function.name + (c.function.arguments | tojson) }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant \n' }}{%- endif %}"""
MISTRAL = KIMI.replace(
    "{{- '<call '",
    "{%- if c.id | length != 9 %}{{- raise_exception('nine letters') }}{%- endif %}{{- '<call '",
)
ALL = """{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}
    {{- (m if m.role == 'tool' else m.content) | string }}
    {%- for c in m.tool_calls or [] %}{{- c | tojson }}{%- endfor %}{{- '<|im_end|>\n' }}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
OTHER = KIMI.replace("m.name or", "m['participant_id'] or m.get('label') or m.name or")


def call_of(number, city):
    function = {"name": "weather", "arguments": {"city": city}}
    return {"id": f"weather:{number}", "type": "function", "function": function}


DIALOG = [
    {"role": "user", "content": "Zürich & <Rome>?", "name": "mara", "participant_id": "p7"},
    {"role": "assistant", "content": "", "tool_calls": [call_of(0, "Zürich"), call_of(1, "Rome")]},
    {"role": "tool", "content": "rain", "tool_call_id": "weather:1", "name": "weather"},
    {"role": "tool", "content": "sun", "tool_call_id": "weather:0", "label": "w"},
    {"role": "assistant", "content": "Zürich sun, Rome rain."},
    {"role": "user", "content": "So?"},
]


def own(source):
    tokenizer = tiny_tokenizers.tokenizer(chat_template=source)
    return Codec(tokenizer, load_template("auto", tokenizer), DataSection(datasets=("any",)))


@pytest.mark.parametrize("source", [KIMI, MISTRAL, ALL, OTHER])
def test_whatever_the_template_reads_of_messages_and_calls_reaches_it(source):
    example, codec = OpenAI().read({"messages": DIALOG}), own(source)
    reference = codec.tokenizer.apply_chat_template(
        DIALOG, tokenize=False, add_generation_prompt=True
    )
    ids = codec.encode_prompt(example.messages)
    assert codec.tokenizer.decode(ids) == reference
    (item,) = codec.encode_chats([replace(example, messages=example.messages[:5])])[0]
    assert codec.tokenizer.decode(item["input_ids"]) in reference
    if source is KIMI:
        assert "<call weather:1" in codec.tokenizer.decode(
            [label for label in item["labels"] if label >= 0]
        )
