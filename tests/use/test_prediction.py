"""Answers to many prompts are those of one conversation each."""

import json
from dataclasses import replace

import pytest

import folders
from surefoot.data.text.prompts import read_prompts
from surefoot.errors import DataError, TemplateError
from surefoot.generate.section import GenerateSection
from surefoot.use import Conversation, open_model, predict

TEXTS = ["Hi", "What is one plus one?", "1 + 1", "A long, long story of the hen"]
LIVELY = {"initializer_range": 0.3}  # prompts matter to what is said


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    folders.save_model(folder / "chat", **LIVELY)
    folders.save_model(folder / "plain", template=None, **LIVELY)
    return folder


@pytest.fixture
def prompts(tmp_path):
    def prompts_of(*rows):
        rows = [row if isinstance(row, dict) else {"prompt": row} for row in rows]
        path = tmp_path / "q.jsonl"
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return read_prompts(path)

    return prompts_of


@pytest.mark.parametrize(
    ("kind", "system"), [("chat", None), ("chat", "Be brief."), ("plain", None)]
)
def test_each_answer_is_that_of_a_conversation(kind, system, folder, prompts):
    opened = open_model(folder / kind)
    section = GenerateSection(max_new_tokens=6, batch_size=3)
    found = predict(opened, prompts(*TEXTS), section, system=system)
    talks = [Conversation(opened, section, system=system) for _ in TEXTS]
    assert found == [talk.ask(text) for talk, text in zip(talks, TEXTS, strict=True)]
    assert len({answer.text for answer in found}) > 2


def test_a_conversation_goes_on(folder, prompts):
    opened = open_model(folder / "chat")
    section = GenerateSection(max_new_tokens=6)
    talk = Conversation(opened, section)
    first, second = talk.ask("Hi"), talk.ask("And?")
    turns = [("user", "Hi"), ("assistant", first.text), ("user", "And?")]
    row = {"messages": [{"role": role, "content": text} for role, text in turns]}
    assert predict(opened, prompts(row), section) == [second]


def test_what_is_sampled_follows_from_the_seed(folder, prompts):
    opened, asked = open_model(folder / "chat"), prompts(*TEXTS)
    section = GenerateSection(max_new_tokens=6, batch_size=2, do_sample=True)
    first, again, other = (predict(opened, asked, section, seed=seed) for seed in (1, 1, 2))
    assert first == again != other


def test_an_answer_says_why_it_ended(folder, prompts):
    opened = open_model(folder / "chat")
    long = "x" * (256 - 25)
    found = predict(opened, prompts("Hi", long), GenerateSection(max_new_tokens=40))
    assert [answer.finish_reason for answer in found] == ["length", "context"]
    assert found[1].text


def test_a_prompt_without_room_is_named_before_any_is_answered(folder, prompts):
    opened, told = open_model(folder / "chat"), []
    asked = prompts("Hi", "x" * 300, "y" * 400)
    reason = r"q\.jsonl: line 2: no room for a response: the prompt has 3\d\d tokens, the model's"
    with pytest.raises(DataError, match=rf"{reason} context length is 256 \(1 more of 3 prompts"):
        predict(opened, asked, GenerateSection(), on_answered=told.append)
    assert told == []


def test_a_model_without_a_template_takes_plain_texts_only(folder, prompts):
    opened = open_model(folder / "plain")
    turns = [{"role": role, "content": "a"} for role in ("user", "assistant", "user")]
    for asked, system in ((prompts("Hi"), "Be brief."), (prompts({"messages": turns}), None)):
        with pytest.raises(TemplateError, match=r"line 1: this model has no chat template"):
            predict(opened, asked, GenerateSection(), system=system)


def test_arguments_of_a_row_reach_the_template(tmp_path, prompts):
    from transformers import AutoTokenizer

    """Of a prompt only, so that no conversation with a response begins with it."""
    plain = folders.CHATML.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    source = (
        plain + "{%- if add_generation_prompt and enable_thinking is false %}<empty>{%- endif %}"
    )
    folder = folders.save_model(tmp_path / "model", template=source, **LIVELY)
    opened, known = open_model(folder), AutoTokenizer.from_pretrained(folder)
    rows = [{"prompt": "Hi"}, {"prompt": "Hi", "chat_template_kwargs": {"enable_thinking": False}}]
    for prompt, row in zip(prompts(*rows), rows, strict=True):
        ids = opened.prompt(prompt.messages, prompt.tools, prompt.template_arguments)
        assert ids == known.apply_chat_template(
            [{"role": "user", "content": "Hi"}],
            add_generation_prompt=True,
            return_dict=False,
            **row.get("chat_template_kwargs", {}),
        )
    plain, given = predict(opened, prompts(*rows), GenerateSection(max_new_tokens=6))
    assert plain.text != given.text


def test_stop_texts_cut_answers_alike_in_predict_and_chat(folder, prompts):
    opened = open_model(folder / "chat")
    section = GenerateSection(max_new_tokens=12, batch_size=3)
    free = [one.text for one in predict(opened, prompts(*TEXTS), section)]
    section = replace(section, stop=(free[0][4:6], free[1][5:7]))
    found = predict(opened, prompts(*TEXTS), section)
    for text, one in zip(free, found, strict=True):
        ends = [text.index(stop) for stop in section.stop if stop in text]
        assert one.text == text[: min(ends, default=None)]
        assert (one.finish_reason == "stop") == bool(ends)
    pieces = []
    assert [Conversation(opened, section).ask(t, pieces.append) for t in TEXTS] == found
    assert "".join(pieces) == "".join(one.text for one in found)
