"""Tool calls in responses of a model, and the results that a user gives to them."""

import io
import json
from types import SimpleNamespace

import pytest
from rich.console import Console

import tiny_tokenizers
from folders import save_model
from surefoot.cli.chat import notes_on, talk
from surefoot.data.example import Message
from surefoot.data.text.prompts import Prompt, read_tools, write_answers
from surefoot.data.text.templates import bundled, load_template
from surefoot.errors import DataError, TemplateError
from surefoot.generate.section import GenerateSection
from surefoot.use import Conversation, open_model
from surefoot.use.conversation import Answer, answer_of, events, with_thinking

TOOL = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
CALL = {"name": "add", "arguments": {"a": 2}}
IDENTIFIED = {"id": "call00000", **CALL}  # as later prompts have it
RESULT = Message("tool", "3", fields={"tool_call_id": "call00000", "name": "add"})
SAID = 'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tools")
    long = {"max_position_embeddings": 2048}
    save_model(folder / "base", template=bundled()["chatml"].source, **long)
    save_model(folder / "plain", template=None)
    return open_model(folder / "base"), open_model(folder / "plain")


def test_calls_are_read_in_the_syntax_of_the_template():
    tokenizer = tiny_tokenizers.tokenizer()
    model = SimpleNamespace(template=load_template("qwen", tokenizer))
    assert answer_of(model, SAID, "stop", [TOOL]).tool_calls == (CALL,)
    assert answer_of(model, SAID, "stop", []).tool_calls == ()
    assert answer_of(model, SAID[:40], "length", [TOOL]).broken_calls == (SAID[7:40],)
    llama = SimpleNamespace(template=load_template("llama3", tokenizer))
    assert answer_of(llama, SAID, "stop", [TOOL]).tool_calls == ()


def test_calls_are_printed_and_written(tmp_path):
    answer = Answer(SAID, "stop", (CALL,), ("<tool_call>{",))
    assert list(notes_on(answer)) == [
        'tool call: add({"a": 2})',
        "a tool call that cannot be read: <tool_call>{",
    ]
    prompt = Prompt("p:1", (Message("user", "2?"),), row={"prompt": "2?"})
    write_answers(tmp_path / "o.jsonl", [prompt] * 2, [answer, Answer("4", "stop")], doing="x")
    first, second = map(json.loads, (tmp_path / "o.jsonl").read_text().splitlines())
    assert first["tool_calls"] == [CALL]
    assert "tool_calls" not in second


def test_the_result_of_a_call_continues_the_conversation(opened):
    talking = Conversation(opened[0], GenerateSection(max_new_tokens=2), tools=[TOOL])
    console = Console(file=io.StringIO(), width=200)
    lines = iter(["/result 3", "/exit"])
    talk(talking, console, lambda: next(lines))
    assert "the last response calls no tool; --tools FILE offers some" in console.file.getvalue()
    talking.messages += [Message("user", "2+1?"), Message("assistant", "", (CALL,))]
    lines = iter(["/result 3", "/exit"])
    talk(talking, console, lambda: next(lines))
    assert [message.role for message in talking.messages] == [
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert talking.messages[2].content == "3"
    talking.retry()
    assert talking.messages[2].content == "3"


def test_a_response_with_calls_is_repeated_as_the_template_writes_it(opened):
    talking = Conversation(opened[0], GenerateSection(max_new_tokens=2), tools=[TOOL])
    found = talking.as_message(Answer(SAID, "stop", (CALL,)))
    assert found == Message("assistant", "I add.", (IDENTIFIED,))
    talking.messages += [Message("user", "2+1?"), found]
    assert talking.new_message("tool", "3") == RESULT
    (later,) = talking.as_message(Answer(SAID, "stop", (CALL,))).tool_calls
    assert later["id"] == "call00001"


def test_tools_need_a_template_and_a_file_of_schemas(opened, tmp_path):
    with pytest.raises(TemplateError, match="supports no tools"):
        Conversation(opened[1], GenerateSection(), tools=[TOOL])
    path = tmp_path / "tools.json"
    with pytest.raises(DataError, match=r"cannot read --tools .*tools\.json: No such file"):
        read_tools(path)
    for text, problem in [("{", "not valid JSON"), ("[]", "contains no function schema")]:
        path.write_text(text)
        with pytest.raises(DataError, match=rf"--tools .*: .*{problem}"):
            read_tools(path)
    path.write_text(json.dumps([TOOL]))
    assert read_tools(path) == (TOOL,)


def test_thinking_is_switched_where_the_template_can(opened):
    model = SimpleNamespace(template=load_template("chatml", tiny_tokenizers.tokenizer()))
    assert with_thinking(opened[0], None) is opened[0]
    with pytest.raises(TemplateError, match="--no-thinking: this model's chat template has no arg"):
        with_thinking(model, False)
    with pytest.raises(TemplateError, match="--thinking: this model has no chat template"):
        with_thinking(opened[1], True)


def test_tools_that_the_template_does_not_write_are_refused(tmp_path):
    save_model(tmp_path / "base")
    talking = Conversation(open_model(tmp_path / "base"), GenerateSection(), tools=[TOOL])
    with pytest.raises(TemplateError, match="does not write the tools"):
        talking.ask("2+1?")


def test_a_request_with_tools_gets_the_calls_and_continues_with_their_result(opened, monkeypatch):
    asked = []

    def answer(self, text, on_text=None, *, role="user"):
        asked.append([*self.messages, self.new_message(role, text)])
        return answer_of(self.opened, SAID, "stop", self.tools)

    monkeypatch.setattr(Conversation, "ask", answer)
    talking = Conversation(opened[0], GenerateSection())

    def ask(*messages, tools):
        request = {"messages": [{"role": r, "content": c} for r, c in messages], "tools": tools}
        return list(events(talking, json.dumps(request), lambda _: None))[-1]

    first = ask(("user", "2?"), tools=json.dumps([TOOL]))
    assert (first["tool_calls"], first["text"]) == ([CALL], SAID)
    ask(("user", "2?"), ("assistant", SAID), ("tool", "3"), tools=[TOOL])
    before = [Message("user", "2?"), Message("assistant", "I add.", (IDENTIFIED,))]
    assert asked[-1] == [*before, RESULT]
    assert "calls no tool" in ask(("tool", "3"), tools=[TOOL])["message"]
    assert "tools: " in ask(("user", "2?"), tools="{")["message"]
    assert ask(("user", "2?"), tools=None)["tool_calls"] == []
