"""Masks for templates that say nothing of masks: found by prompts, or refused."""

import logging

import pytest

import tiny_tokenizers
from surefoot.batch import IGNORE_INDEX
from surefoot.data.example import Dropped, Example, Message
from surefoot.data.section import DataSection
from surefoot.data.text.codec import Codec
from surefoot.data.text.templates import load_template
from surefoot.errors import TemplateError

# Small templates, each with one habit of a real one.
TURN = "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
PLAIN = (
    "{% for m in messages %}" + TURN + "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
STRIPPING = PLAIN.replace("m.content", "m.content | trim")
FORGETFUL = (  # drops the reasoning of earlier answers, and writes an empty one into the last
    "{% for m in messages %}{% set text = m.content.split('</think>')[-1].lstrip() %}"
    "{% set thought = m.content.split('</think>')[0].split('<think>')[-1].strip() "
    "if '</think>' in m.content else '' %}"
    "{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if loop.last and m.role == 'assistant' %}"
    "{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}"
    "{{ text + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MOVING = (  # writes the system message into the last turn of the user
    "{{ bos_token }}{% set system = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% for m in messages if m.role != 'system' %}{% if m.role == 'user' %}"
    "{{ '[INST] ' }}"
    "{% if loop.last or loop.index == loop.length - 1 %}{{ system + ' ' }}{% endif %}"
    "{{ m.content + '[/INST]' }}{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
THINKING = PLAIN.replace("assistant\n' }}{% endif", "assistant\n<think>\n' }}{% endif")
AMNESIC = THINKING.replace("m.content +", "m.content.split('</think>')[-1] +")
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}"
    + TURN
    + "{% endgeneration %}"
    "{% else %}" + TURN + "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
IN_A_MACRO = (
    "{% macro turn(m) %}{{ '<|im_start|>' + m.role + '\n' }}{% generation %}"
    "{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% endmacro %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ turn(m) }}{% else %}"
    + TURN
    + "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED_LAST = MARKED.replace(
    "{% if m.role == 'assistant' %}", "{% if m.role == 'assistant' and loop.last %}"
)


def codec(source, **section):
    tokenizer = tiny_tokenizers.tokenizer(chat_template=source)
    return Codec(
        tokenizer, load_template("auto", tokenizer), DataSection(datasets=("any",), **section)
    )


def chat(*turns, system=None):
    roles = ("user", "assistant")
    messages = [Message(roles[i % 2], text) for i, text in enumerate(turns)]
    if system is not None:
        messages.insert(0, Message("system", system))
    return Example(tuple(messages))


def learnt(made, item):
    """What stands before the first label, and what is learnt."""
    pairs = zip(item["input_ids"], item["labels"], strict=True)
    ids = [token for token, label in pairs if label != IGNORE_INDEX]
    first = next(i for i, label in enumerate(item["labels"]) if label != IGNORE_INDEX)
    return made.tokenizer.decode(item["input_ids"][:first]), made.tokenizer.decode(ids)


def taught(made, example):
    """Each item of an example, as ``learnt`` gives it, after a check against the chat's prompts."""
    items = made.encode_chats([example])[0]
    assert not isinstance(items, Dropped), items.reason
    prompts = [
        made.tokenizer.apply_chat_template(
            [{"role": m.role, "content": m.content} for m in example.messages[:i]],
            add_generation_prompt=True,
            return_dict=False,
        )
        for i, message in enumerate(example.messages)
        if message.role == "assistant"
    ]
    for item in items:
        first = next(i for i, label in enumerate(item["labels"]) if label != IGNORE_INDEX)
        assert item["input_ids"][:first] in prompts
    return [learnt(made, item) for item in items]


@pytest.mark.parametrize("source", [PLAIN, IN_A_MACRO, MARKED_LAST, MARKED])
def test_answers_are_found_behind_their_prompts_whatever_is_marked(source):
    """Marks in a macro have no known place (all-ones masks); on the last turn only, some lack;
    and SmolLM3's begin before the header and end after the line break."""
    ((prompt, answers),) = taught(codec(source), chat("a", "one", "b", "two"))
    assert prompt == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    assert answers == "one<|im_end|>two<|im_end|>"


def test_a_template_that_strips_white_space_is_masked_by_what_it_writes():
    ((_, answers),) = taught(codec(STRIPPING), chat(" a ", "\n one \n", "b", " two"))
    assert answers == "one<|im_end|>two<|im_end|>"


def test_answers_that_are_rewritten_as_history_are_learnt_as_they_were_given():
    """Qwen3's habit: each answer in a sequence of its own, thought included, behind its prompt."""
    thinking = chat("a", "<think>\nhm\n</think>\n\none", "b", "<think>\nso\n</think>\n\ntwo")
    items = taught(codec(FORGETFUL), thinking)
    assert sorted(answer for _, answer in items) == [
        "<think>\nhm\n</think>\n\none<|im_end|>",
        "<think>\nso\n</think>\n\ntwo<|im_end|>",
    ]
    (history,) = [prompt for prompt, answer in items if "two" in answer]
    assert "hm" not in history
    assert "one" in history


def test_with_mask_history_a_forgetful_template_gives_one_sequence():
    ((_, answer),) = taught(codec(FORGETFUL, mask_history=True), chat("a", "one", "b", "two"))
    assert answer == "<think>\n\n</think>\n\ntwo<|im_end|>"


def test_a_prompt_that_changes_with_later_turns_is_met_turn_by_turn():
    items = taught(codec(MOVING), chat("a", "one", "b", "two", system="SYS"))
    assert sorted(items) == [
        ("<s>[INST] SYS a[/INST]", " one</s>"),
        ("<s>[INST] a[/INST] one</s>[INST] SYS b[/INST]", " two</s>"),
    ]


def test_a_generation_prompt_that_begins_the_thought_takes_thinking_answers():
    made = codec(THINKING)
    ((prompt, answer),) = taught(made, chat("a", "<think>\nhm\n</think>one"))
    assert prompt.endswith("assistant\n<think>\n")
    assert answer == "hm\n</think>one<|im_end|>"
    (outcome,) = made.encode_chats([chat("a", "plain")])
    assert isinstance(outcome, Dropped)
    assert "does not begin with its prompt" in outcome.reason


def test_a_template_whose_answers_do_not_follow_its_prompts_is_refused():
    with pytest.raises(TemplateError) as caught:
        codec(AMNESIC).encode_chats([chat("a", "one")])
    text = str(caught.value)
    assert "cannot be masked" in text
    assert "<think>" in text
    assert "data.template" in text
    assert "{% generation %}" in text


def test_a_template_that_writes_no_answers_is_refused():
    silent = "{% for m in messages if m.role == 'user' %}" + TURN + "{% endfor %}"
    with pytest.raises(TemplateError, match="cannot be masked"):
        codec(silent).encode_chats([chat("a", "one")])


def test_a_template_that_is_not_jinja_says_where(tmp_path):
    made = codec("{% for m in messages %}\n{% oops %}")
    made.tokenizer.name_or_path = str(tmp_path)
    with pytest.raises(TemplateError) as caught:
        made.encode_chats([chat("a", "one")])
    text = str(caught.value)
    assert text.startswith(f"{tmp_path}: the chat template is not valid Jinja, line 2: ")
    assert "masked" not in text
    assert not text.endswith(".")


@pytest.mark.parametrize("source", ["{{ raise_exception('No.') }}", "{{ 1 + '.' }}"])
def test_an_error_of_a_template_is_one_sentence(source):
    with pytest.raises(TemplateError) as caught:
        codec(source).encode_chats([chat("a", "one")])
    assert ".." not in str(caught.value)


def test_marks_on_a_template_that_cannot_be_masked_are_believed_with_a_warning(caplog):
    answer = "{% generation %}{{ m.content + '<|im_end|>\n' }}{% endgeneration %}"
    source = AMNESIC.replace(
        TURN.replace("m.content", "m.content.split('</think>')[-1]"),
        "{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
        + answer
        + "{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}",
    )
    assert "generation" in source
    made = codec(source)
    with caplog.at_level(logging.WARNING):
        ((item),) = made.encode_chats([chat("a", "one")])[0]
    assert learnt(made, item)[1] == "one<|im_end|>"
    assert "chat differs from training" in caplog.text


def test_a_template_that_never_stops_is_said(caplog):
    endless = PLAIN.replace("<|im_end|>", "").replace("<|im_start|>", "# ")
    with caplog.at_level(logging.WARNING):
        taught(codec(endless), chat("a", "one"))
    assert "a model cannot learn to stop" in caplog.text


def test_a_row_that_the_template_refuses_is_dropped_and_the_rest_is_kept():
    strict = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    made = codec(strict + PLAIN)
    outcomes = made.encode_chats([chat("a", "one", system="S"), chat("a", "one")])
    assert outcomes[0] == Dropped("the chat template rejects this conversation: no system")
    assert len(outcomes[1]) == 1
