"""The text of a conversation is that of transformers' own function, whatever is in it."""

import sys
from enum import StrEnum
from types import SimpleNamespace

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

import tiny_tokenizers
from surefoot.data.text.templates import find_bundled, render
from surefoot.data.text.templates.render import Renderer
from surefoot.errors import TemplateError

TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}},
}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": [1, None, 2.5, True]}}}
QUESTION = {"role": "user", "content": "What is é?"}
ANSWER = {"role": "assistant", "content": "A letter."}


class Kind(StrEnum):
    SMALL = "small"


class Text(str):
    def upper(self):
        raise AssertionError("a template runs code of a row")


CONVERSATIONS = {
    "two turns": ([QUESTION, ANSWER], None),
    "four turns": ([{"role": "system", "content": "Be kind."}, QUESTION, ANSWER] * 2, None),
    "a thought": ([QUESTION, {**ANSWER, "reasoning_content": "Hm."}], None),
    "a thought by another name": ([QUESTION, {**ANSWER, "thinking": "Hm."}], None),
    "calls": ([QUESTION, {**ANSWER, "tool_calls": [CALL]}], [TOOL]),
    "subclasses": ([{**QUESTION, "content": Text("a"), "name": Kind.SMALL}, ANSWER], None),
    "other values": ([QUESTION, {**ANSWER, "tool_calls": [{**CALL, "id": object}]}], [TOOL]),
    "parts": ([{**QUESTION, "content": [{"type": "text", "text": "a"}]}, ANSWER], None),
}
SHOWING = (  # all that it gets, so that another treatment of any of it shows
    "{% for m in messages %}{% for key, value in m.items() %}{{ key }} {{ value | tojson }} "
    "{{ value is mapping }}{{ value.upper() if value is string }}{% endfor %}{% endfor %}"
    "{{ tools }} {{ documents }} {{ eos_token }} {{ namespace(a=1).a }} {{ dict(a=1) }}"
    "{{ '<|im_start|>assistant' if add_generation_prompt }}"
)
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


def rendered(renderer, case, **more):
    """What it writes, or why it does not."""
    try:
        return renderer.render(*CONVERSATIONS[case], **more)
    except TemplateError as error:
        return str(error).rpartition(": ")[2]


def transformers_s(tokenizer, case, **more):
    """The same by ``apply_chat_template``."""
    messages, tools = CONVERSATIONS[case]
    try:
        return tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=more.get("prompt", False)
        )
    except Exception as error:
        return str(error).removesuffix(".").rpartition(": ")[2]


@pytest.mark.parametrize("case", CONVERSATIONS)
@pytest.mark.parametrize("name", ["chatml", "qwen3", "llama3", "gemma", "mistral", "gpt_oss", ""])
def test_a_conversation_is_written_as_transformers_writes_it(name, case):
    source = find_bundled(name).source if name else SHOWING
    tokenizer = tiny_tokenizers.tokenizer(chat_template=source)
    renderer = Renderer(source, tokenizer)
    for prompt in (False, True):
        wanted = transformers_s(tokenizer, case, prompt=prompt)
        assert rendered(renderer, case, prompt=prompt) == wanted


@pytest.mark.parametrize("value", [1, Kind.SMALL, object, {"b": [None]}])
def test_an_argument_is_given_as_transformers_gives_it(value):
    source = SHOWING + "{{ a }} {{ a is string }} {{ a is mapping }}"
    renderer = Renderer(source, tiny_tokenizers.tokenizer()).with_arguments({"a": value})
    names = tiny_tokenizers.tokenizer().special_tokens_map
    messages, _ = CONVERSATIONS["two turns"]
    (wanted,), _ = render_jinja_template([messages], chat_template=source, a=value, **names)
    assert renderer.render(messages) == wanted


def test_the_marks_are_those_of_transformers():
    renderer = Renderer(MARKED, tiny_tokenizers.tokenizer())
    text, spans = renderer.render_marked(*CONVERSATIONS["four turns"])
    wanted = render_jinja_template(
        [CONVERSATIONS["four turns"][0]], chat_template=MARKED, return_assistant_tokens_mask=True
    )
    assert ([text], [spans]) == wanted
    assert [text[start:end] for start, end in spans] == ["A letter."] * 2


def test_a_value_that_transformers_cannot_copy_costs_its_row():
    deep: list = []
    for _ in range(sys.getrecursionlimit()):
        deep = [deep]
    renderer = Renderer("{{ messages | length }}", tiny_tokenizers.tokenizer())
    with pytest.raises(TemplateError, match="RecursionError"):
        renderer.render([{**QUESTION, "name": deep}])


def test_what_a_later_transformers_does_around_a_template_is_done(monkeypatch):
    """Such as to pass it one more name, or to compile it elsewhere."""

    def later(conversations, **more):
        return render_jinja_template(conversations, documents=[{"text": "new"}], **more)

    monkeypatch.setattr(render, "render_jinja_template", later)
    renderer = Renderer("{{ documents[0].text }}", tiny_tokenizers.tokenizer())
    assert renderer.render(*CONVERSATIONS["two turns"]) == "new"


def test_a_transformers_that_compiles_elsewhere_renders(monkeypatch, caplog):
    monkeypatch.setattr(render, "chat_template_utils", SimpleNamespace())
    renderer = Renderer("{{ messages | length }} messages", tiny_tokenizers.tokenizer())
    assert renderer.render(*CONVERSATIONS["two turns"]) == "2 messages"
    assert "conversations are rendered by its own function" in caplog.text
