"""Conversations that are written from pieces are what the template writes, whatever it does."""

import datetime
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

import tiny_tokenizers
from surefoot.data.rows.registry import read_registry
from surefoot.data.rows.rows import read_examples
from surefoot.data.section import DataSection
from surefoot.data.text.codec import Codec
from surefoot.data.text.templates import bundled, load_template
from surefoot.data.text.templates.fast.traced_template import TracedTemplate

NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
ODD = [
    "",
    " ",
    "\n\n",
    "\t x \n",
    "x",
    "yes",
    "a</think>b",
    "<think>\nhm\n</think>\n\nso",
    "{{ x }}",
]
ODD += [
    "{% if %}",
    "<|im_end|>",
    "</s>",
    "\"quoted\" 'text' \\ & <b>",
    "é\u0301你好🙂",
    "0",
    "none",
]
ODD += [
    "<tool_response>r</tool_response>",
    "A Title",
    "%s %d %%",
    "a,b,c",
    "long " * 3000,
    "\0\x1b",
]
CONTENTS = st.one_of(
    st.sampled_from(ODD),
    st.text(max_size=20),
    st.lists(st.sampled_from(ODD), max_size=3).map("".join),
)
ROLES = st.sampled_from(
    [
        ("user", "assistant"),
        ("system", "user", "assistant"),
        ("user", "assistant", "user", "assistant"),
        ("user",),
        ("assistant", "tool", "user"),
        (),
    ]
)
CONVERSATIONS = st.lists(
    ROLES.flatmap(lambda roles: st.tuples(*[st.tuples(st.just(r), CONTENTS) for r in roles])),
    min_size=1,
    max_size=12,
)

EACH = {  # what a template does with the content of each message, and whether that can be followed
    "{{ m.content }}": True,
    "{{ m['content'] + '|' + m.content }}": True,
    "{{ m.content ~ m.content ~ 7 }}": True,
    "{{ m.content | trim }}": True,
    "{{ m.content.strip() + m.content.rstrip('x') + m.content.replace('a', 'b') }}": True,
    "{{ m.content.upper() }}": True,
    "{{ m.content if m.content }}": True,
    "{{ 'empty' if not m.content | trim }}": True,
    "{{ 'so' if m.content == 'yes' }}{{ 'no' if m.content != 'x' }}": True,
    "{{ 'thinks' if '</think>' in m.content }}": True,
    "{{ 'listed' if m.content in ['x', 'yes'] }}": True,
    "{{ 'starts' if m.content.startswith('<') }}": True,
    "{{ m.content.split('</think>')[-1].lstrip('\n') }}": True,
    "{{ m.content.split('</think>')[0].split('<think>')[-1] if '</think>' in m.content }}": True,
    "{{ m.content if m.content is string else 'other' }}": True,
    "{{ 'd' if m.content is defined and m.content is not none and m.thought is undefined }}": True,
    "{{ m.content.text or m.content.parts | default('nothing') }}": True,
    "{{ m.content | default('x', true) }}": True,
    "{% set t = m.content %}{% set t = t + '!' %}{{ t }}": True,
    "{% set t %}[{{ m.content }}]{% endset %}{{ t }}{{ 1 if t == '[x]' }}": True,
    "{% set n.all = n.all ~ m.content %}{{ n.all }}": True,
    "{% macro w(c) %}<{{ c | trim }}>{% endmacro %}{{ w(m.content) }}": True,
    "{% macro w(c) %}{{ c }}{% endmacro %}{{ w(m.content).strip() }}{{ 1 if w(m.content) }}": True,
    "{% call(x) each(m.content) %}({{ x }}){% endcall %}": True,
    "{% generation %}{{ m.content + eos_token }}{% endgeneration %}": True,
    "{% set t %}{% generation %}{{ m.content }}{% endgeneration %}{% endset %}{{ t }}": True,
    "{% if loop.changed(m.role) %}{{ m.content }}{% endif %}": True,
    "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='role') | join }}": True,
    "{{ messages | selectattr('content') | list | length }}": True,
    "{{ messages[::-1][0].content }}{{ (messages | last).content }}": True,
    "{% if loop.last and m.role == 'user' %}{% break %}{% endif %}{{ m.content }}": True,
    "{% if m.content == 'x' %}{{ raise_exception('no x') }}{% endif %}{{ m.content }}": True,
    "{{ strftime_now('%Y') + m.content }}": True,
    "{{ strftime_now is defined }}{{ m.content }}": True,
    "{{ '%s' % m.content }}": False,
    "{{ 'a' % m.content }}": False,
    "{{ '%s' | format(m.content) }}": False,
    "{{ '{}'.format(m.content) }}": False,
    "{{ m.content | upper }}{{ m.content | title }}": False,
    "{{ m.content | length }}{{ m.content[:3] }}": False,
    "{{ m.content[0] }}": False,
    "{{ 'abc'[m.content] }}": False,
    "{{ {'x': 1}[m.content] }}{{ messages[m.content] }}": False,
    "{{ {'x': 1}.get(m.content) }}": False,
    "{% for c in m.content %}{{ c }}.{% endfor %}": False,
    "{% for c in m.content.split(',') %}{{ c }}.{% endfor %}": False,
    "{{ m.content.split(',')[1] }}{{ m.content.split(',') | length }}": False,
    "{{ m.content.split() | first }}{{ m.content.split()[0] }}": False,
    "{{ m.content.split('a', 1)[-1] }}": True,
    "{{ m.content.split(',') | join('-') }}": False,
    "{{ 'x' if m.content.split(',') }}{{ m.content.split(',') == ['x'] }}": False,
    "{{ m.content.split(',') is sequence }}{{ m.content.split(',') is iterable }}": False,
    "{{ m.content.split(',') is callable }}{{ m.content.split(',') is string }}": True,
    "{{ '%c' % (m.content,) }}{{ '%(a)s' % {'a': m.content} }}": False,
    "{{ [m.content] == ['x'] }}{{ 'x' in [m.content] }}{{ [m.content, 1] == messages }}": True,
    "{{ (m.content,) < ('m',) }}": False,
    "{{ m.content is callable }}{{ m.content is iterable }}{{ m.content is sequence }}": True,
    "{{ m.content | tojson }}{{ m | tojson }}": False,
    "{{ m }}{{ messages }}": False,
    "{{ m.content | replace('a', 'b') }}": False,
    "{{ m.content | int + 1 }}": False,
    "{{ m.content | string | wordcount }}": False,
    "{{ m.content * 2 }}": False,
    "{{ 'x' if m.content < 'm' }}": False,
    "{{ 'x' if m.content in 'no yes' }}": False,
    "{{ 'x' if m.content == messages[0].content }}": False,
    "{{ 'x' if 'abc'.startswith(m.content) }}{{ 'abc'.replace(m.content, '') }}": False,
    "{{ 'x' if m.content is sameas '' }}": False,
    "{{ 'x' if m.content is lower }}": False,
    "{{ [m.content] | join }}{{ ','.join([m.content]) }}": False,
    "{{ messages | map(attribute='content') | join(' ') }}": False,
    "{{ messages | map(attribute='content') | unique | list | length }}": False,
    "{{ messages | groupby('content') | list | length }}": False,
    "{{ m.content | e }}{{ m.content | safe }}": False,
    "{% autoescape true %}{{ m.content }}{% endautoescape %}": False,
    "{% filter upper %}{{ m.content }}{% endfilter %}": False,
    "{{ (1, m.content) | string }}": False,
    "{{ m.content.encode() | string }}{{ m.content.find('x') }}": False,
    "{{ m.content.strip(1) }}": False,
    "{{ m.content.nothing() }}": False,
    "{{ m.content() }}": False,
    "{{ range(m.content) }}": False,
    "{{ raise_exception(m.content) }}": False,
    "{{ strftime_now(m.content) }}": False,
    "{{ 'x' | tojson + m.content }}": False,
}
FRAME = (
    "{%- set n = namespace(all='') -%}{% macro each(c) %}{{ caller(c) }}{% endmacro %}"
    "{% for m in messages %}{{ '<' + m.role + '>' }}BODY\n{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
SOURCES = {name: found.source for name, found in bundled().items()}
QWEN3 = (  # how Qwen3's own template takes reasoning out of earlier turns
    "{%- set ns = namespace(tool=true, last=messages|length - 1) %}"
    "{%- for m in messages[::-1] %}{%- set index = (messages|length - 1) - loop.index0 %}"
    "{%- if ns.tool and m.role == 'user' and m.content is string and not("
    "m.content.startswith('<tool_response>') and m.content.endswith('</tool_response>')) %}"
    "{%- set ns.tool = false %}{%- set ns.last = index %}{%- endif %}{%- endfor %}"
    "{%- for m in messages %}{%- if m.content is string %}{%- set content = m.content %}"
    "{%- else %}{%- set content = '' %}{%- endif %}"
    "{%- if m.role == 'assistant' %}{%- set thought = '' %}"
    "{%- if m.reasoning_content is string %}{%- set thought = m.reasoning_content %}{%- else %}"
    "{%- if '</think>' in content %}"
    "{%- set thought = content.split('</think>')[0].rstrip('\n') %}"
    "{%- set thought = thought.split('<think>')[-1].lstrip('\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}{%- endif %}"
    "{%- if loop.index0 > ns.last and (loop.last or thought) %}"
    "{{- '<|im_start|>assistant\n<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content }}"
    "{%- else %}{{- '<|im_start|>assistant\n' + content }}{%- endif %}{{- '<|im_end|>\n' }}"
    "{%- else %}{{- '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}{%- endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)


def theirs(source, messages, *, prompt, marks):
    """What transformers makes of a conversation."""
    texts, spans = render_jinja_template(
        [messages],
        chat_template=source,
        add_generation_prompt=prompt,
        return_assistant_tokens_mask=marks,
        **NAMES,
    )
    return texts[0], list(spans[0]) if spans else []


class Counted:
    """transformers, and how often it was asked."""

    def __init__(self, source):
        self.source, self.calls = source, 0

    def __call__(self, messages, *, prompt, marks):
        self.calls += 1
        return theirs(self.source, messages, prompt=prompt, marks=marks)


def dicts(turns):
    return [{"role": role, "content": content} for role, content in turns]


def outcome(function, *args, **options):
    try:
        return function(*args, **options)
    except Exception as error:
        return type(error), str(error)


def check(source, conversations):
    """That every conversation is rendered as it should be, three times, in turn with others."""
    traced, marks = TracedTemplate(source, NAMES, Counted(source)), "generation" in source
    for turns in [*conversations, *conversations, *conversations[::-1]]:
        messages = dicts(turns)
        for options in ({"prompt": True, "marks": False}, {"prompt": False, "marks": marks}):
            expected = outcome(theirs, source, messages, **options)
            assert outcome(traced.render, messages, **options) == expected


@pytest.mark.parametrize("name", sorted(SOURCES))
@settings(max_examples=25)
@given(conversations=CONVERSATIONS)
def test_bundled_templates_write_the_same_from_pieces(name, conversations):
    check(SOURCES[name], conversations)


@settings(max_examples=50)
@given(conversations=CONVERSATIONS)
def test_a_template_that_forgets_reasoning_writes_the_same_from_pieces(conversations):
    check(QWEN3, conversations)


@pytest.mark.parametrize("body", EACH)
@settings(max_examples=4)
@given(conversations=CONVERSATIONS)
def test_whatever_a_template_does_the_text_is_the_same(body, conversations):
    check(FRAME.replace("BODY", body), conversations)


@pytest.mark.parametrize(("body", "is_followed"), EACH.items())
def test_what_can_be_followed_is_run_for_the_first_conversations_only(body, is_followed):
    asked = Counted(FRAME.replace("BODY", body))
    traced = TracedTemplate(asked.source, NAMES, asked)
    for i in range(6):
        outcome(traced.render, dicts([("user", f"a{i}")]), prompt=False, marks=False)
    before = asked.calls
    for i in range(6):
        outcome(traced.render, dicts([("user", f"b{i}")]), prompt=False, marks=False)
    assert asked.calls - before == (0 if is_followed else 6)


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_every_bundled_template_can_be_followed(name):
    asked = Counted(SOURCES[name])
    traced = TracedTemplate(asked.source, NAMES, asked)
    messages = dicts([("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c")])
    for prompt, marks in [(True, False), (False, True)] * 4:
        traced.render(messages, prompt=prompt, marks=marks)
    assert asked.calls <= 6


def test_another_answer_to_a_question_is_another_shape():
    asked = Counted(FRAME.replace("BODY", "{{ 'thinks' if '</think>' in m.content }}"))
    traced = TracedTemplate(asked.source, NAMES, asked)
    for i in range(20):
        assert (
            "thinks" not in traced.render(dicts([("user", f"{i}")]), prompt=False, marks=False)[0]
        )
        thought = dicts([("user", f"{i}</think>")])
        assert "thinks" in traced.render(thought, prompt=False, marks=False)[0]
    assert asked.calls < 8


def test_bounds_in_a_longer_text_are_those_that_transformers_gives():
    """It counts from the wrong place there, and what asks for bounds is to see that."""
    source = FRAME.replace(
        "BODY", "{% set t %}a{% generation %}{{ m.content }}{% endgeneration %}{% endset %}{{ t }}"
    )
    traced, messages = TracedTemplate(source, NAMES, Counted(source)), dicts([("user", "x")])
    for _ in range(4):
        found = traced.render(messages, prompt=False, marks=True)
        assert found == theirs(source, messages, prompt=False, marks=True)


def test_several_threads_may_ask_at_once():
    body = "{{ m.content | trim ~ '!' }}{{ 1 if 'x' in m.content }}{{ 2 if m.content }}"
    source = FRAME.replace("BODY", body)
    traced = TracedTemplate(source, NAMES, Counted(source))
    conversations = [
        dicts([("user", f"{n} x" if n % 3 else ""), ("assistant", "x" * (n % 2))] * (1 + n % 7))
        for n in range(200)
    ]
    write = partial(traced.render, prompt=False, marks=False)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(write, conversations))
    assert found == [theirs(source, c, prompt=False, marks=False) for c in conversations]


def test_the_date_is_that_of_the_day_on_which_a_row_is_written():
    source = "{{ strftime_now('%d %b %Y') }}{{ messages[0].content }}"
    traced = TracedTemplate(source, NAMES, Counted(source))
    for i in range(4):
        written = traced.render(dicts([("user", str(i))]), prompt=False, marks=False)[0]
        assert written == datetime.datetime.now().strftime("%d %b %Y") + str(i)


@pytest.mark.parametrize(
    ("name", "template"),
    [
        ("alpaca_en_demo", "vicuna"),
        ("glaive_toolcall_en_demo", "chatml"),
        ("dpo_en_demo", "mistral"),
    ],
)
def test_real_rows_give_the_same_features_together_as_alone(shared, name, template):
    """Alone, with a codec of its own, a row is the first of its shape."""
    tokenizer = tiny_tokenizers.tokenizer()
    examples = list(read_examples(read_registry(shared / "data").entry(name)))
    together = codec(tokenizer, template).encode_chats(examples)
    for i in range(0, len(examples), 25):
        assert codec(tokenizer, template).encode_chats(examples[i : i + 1]) == [together[i]]


def codec(tokenizer, template):
    section = DataSection(datasets=("any",), train_on_prompt=template == "vicuna")
    return Codec(tokenizer, load_template(template, tokenizer), section)
