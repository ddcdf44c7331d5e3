"""Templates by name, or the tokenizer's own; what is wrong is said with a way out."""

import pytest

import tiny_tokenizers
from surefoot.data.text.families import families
from surefoot.data.text.templates import (
    Template,
    bundled,
    load_template,
    names,
    saved_source,
    template_mismatch,
    with_system,
)
from surefoot.data.text.templates.render import Renderer
from surefoot.errors import TemplateError

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_a_template_has_its_name_its_text_and_what_ends_an_answer():
    template = load_template("llama3", tiny_tokenizers.tokenizer())
    assert template.name == "llama3"
    assert "<|eot_id|>" in template.source
    assert template.stop == ("<|eot_id|>",)
    assert load_template("alpaca", tiny_tokenizers.tokenizer()).stop == ("</s>",)
    assert load_template("llama2", tiny_tokenizers.tokenizer()).stop == ("</s>",)


def test_an_alias_is_the_same_text():
    tokenizer = tiny_tokenizers.tokenizer()
    assert load_template("qwen", tokenizer).source == load_template("chatml", tokenizer).source


def test_auto_is_the_tokenizer_s_own_and_finds_what_ends_its_answers():
    families.cache_clear()
    template = load_template("auto", tiny_tokenizers.tokenizer(chat_template=CHATML))
    assert template == Template("auto", CHATML, ("<|im_end|>", "</s>"))
    assert not families.cache_info().misses  # the table is slow to read, and none wrote this one


def test_auto_of_several_templates_is_the_default_one():
    several = {"default": CHATML, "tool_use": "something else"}
    tokenizer = tiny_tokenizers.tokenizer(chat_template=several)
    assert load_template("auto", tokenizer).source == CHATML
    assert saved_source(tiny_tokenizers.tokenizer()) is None


def test_auto_without_a_template_names_those_there_are():
    with pytest.raises(TemplateError) as caught:
        load_template("auto", tiny_tokenizers.tokenizer())
    assert all(name in str(caught.value) for name in bundled())
    assert {"qwen", "qwen3", "glm4", *bundled()} <= set(names())


def test_an_unknown_name_gets_the_nearest():
    with pytest.raises(TemplateError, match=r"'lama3' \(did you mean llama3\?\)"):
        load_template("lama3", tiny_tokenizers.tokenizer())
    with pytest.raises(TemplateError, match=r"'zzz'; choose auto, alpaca, .* families"):
        load_template("zzz", tiny_tokenizers.tokenizer())


def test_special_tokens_that_would_be_split_are_named_with_what_to_add():
    tokenizer = tiny_tokenizers.tokenizer("llama2")
    kept = tokenizer.get_vocab()
    for token in ("<|eot_id|>", "<|im_end|>"):
        assert token in kept
    bare = tiny_tokenizers.bare_tokenizer()
    with pytest.raises(TemplateError) as caught:
        load_template("chatml", bare)
    assert "model.new_special_tokens: ['<|im_start|>', '<|im_end|>']" in str(caught.value)
    bare.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    assert load_template("chatml", bare)


def test_a_template_that_ends_in_eos_needs_one():
    with pytest.raises(TemplateError, match="eos_token"):
        load_template("alpaca", tiny_tokenizers.tokenizer(eos_token=None))
    assert load_template("chatml", tiny_tokenizers.tokenizer(eos_token=None))


def test_agreement_in_other_words_is_agreement():
    tokenizer = tiny_tokenizers.tokenizer(chat_template=load_template_source("chatml"))
    assert template_mismatch(load_template("chatml", tokenizer), tokenizer) is None
    assert (
        template_mismatch(load_template("llama3", tokenizer), tiny_tokenizers.tokenizer()) is None
    )
    assert template_mismatch(load_template("auto", tokenizer), tokenizer) is None
    spaced = load_template_source("chatml") + "{# a comment #}"
    tokenizer = tiny_tokenizers.tokenizer(chat_template=spaced)
    assert template_mismatch(load_template("chatml", tokenizer), tokenizer) is None


def load_template_source(name):
    return bundled()[name].source


def test_a_disagreement_says_where_and_what_is_saved():
    injecting = "{{ '<|im_start|>system\nYou are Q<|im_end|>\n' if messages[0].role != 'system' }}"
    tokenizer = tiny_tokenizers.tokenizer(chat_template=injecting + CHATML)
    text = template_mismatch(load_template("chatml", tokenizer), tokenizer)
    assert "for a question, several turns, tools." in text
    assert "You are Q" in text
    assert "saves it with the weights" in text


def test_a_disagreement_over_tools_alone_is_one_plain_sentence():
    """It was five lines with two pieces of a template, for data that has no tools."""
    calling = "{{ 'You may call: ' ~ tools if tools }}" + CHATML
    tokenizer = tiny_tokenizers.tokenizer(chat_template=calling)
    text = template_mismatch(load_template("chatml", tokenizer), tokenizer)
    assert "rows without tools are the same" in text
    assert "You may call" not in text


def test_a_disagreement_in_the_answers_only_is_found():
    thinking = CHATML.replace(
        "m.content", "('<think></think>' if m.role == 'assistant' else '') + m.content"
    )
    tokenizer = tiny_tokenizers.tokenizer(chat_template=thinking)
    assert "<think></think>" in template_mismatch(load_template("chatml", tokenizer), tokenizer)


def test_a_saved_template_that_refuses_a_conversation_disagrees_there():
    strict = "{{ raise_exception('no system') if messages[0].role == 'system' }}" + CHATML
    tokenizer = tiny_tokenizers.tokenizer(chat_template=strict)
    text = template_mismatch(load_template("chatml", tokenizer), tokenizer)
    assert "for a system message, tools." in text
    assert "no system" in text


@pytest.mark.parametrize(
    "expression",
    [
        "{{ 1 / 0 }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{{ (1e308 * 10) | int }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ 'a' * 10**19 }}",
    ],
)
def test_what_a_template_raises_is_said_in_a_sentence(expression):
    tokenizer = tiny_tokenizers.tokenizer(chat_template=CHATML + expression)
    renderer = Renderer(load_template("auto", tokenizer).source, tokenizer)
    with pytest.raises(TemplateError, match="the chat template fails on this conversation: "):
        renderer.render([{"role": "user", "content": "hi"}])


PARTS = "m.content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join"


@pytest.mark.parametrize("form", ["text", "parts"])
@pytest.mark.parametrize("text", ['Say """yes""".\n"Often"\\ {x} %}', "短く。"])
def test_a_system_text_that_is_written_into_a_template_is_for_conversations_without_one(text, form):
    known = tiny_tokenizers.tokenizer()
    user, system = {"role": "user", "content": "Hi"}, {"role": "system", "content": "Other"}
    source = CHATML if form == "text" else CHATML.replace("m.content", PARTS)
    written, plain = (Renderer(s, known) for s in (with_system(source, text, known), source))
    of_text = {"role": "system", "content": text}
    for given, expected in (([user], [of_text, user]), ([system, user], [system, user])):
        assert written.render(given, prompt=True) == plain.render(expected, prompt=True)
    assert written.render([]) == plain.render([of_text])
