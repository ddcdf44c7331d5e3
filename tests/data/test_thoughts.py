"""Thoughts of responses: where they stand, what is trained on, and what templates are told."""

from dataclasses import replace

import pytest

import tiny_tokenizers
from surefoot.batch import IGNORE_INDEX
from surefoot.data.example import Dropped, Example, Message
from surefoot.data.section import DataSection
from surefoot.data.text.codec import Codec
from surefoot.data.text.templates import load_template, section_template
from surefoot.errors import TemplateError

EMPTY = "<think>\n\n</think>\n\n"
# As Qwen3's own: thoughts of the last turn only, an empty one without, none before a response if
# thinking is off.
QWEN3 = (
    "{%- for m in messages %}{%- set thought = m.reasoning_content or '' %}"
    "{%- set content = m.content %}"
    "{%- if '</think>' in content %}"
    "{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
    "{{- '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.role == 'assistant' and loop.last %}"
    "{{- '<think>\n' + thought + '\n</think>\n\n' }}{%- endif %}"
    "{{- content + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think>\n\n</think>\n\n' }}{%- endif %}{%- endif %}"
)
MARKED = (  # with marks, and without the thoughts of earlier turns
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.role == 'assistant' %}{% generation %}"
    "{{- (m.content if loop.last else m.content.split('</think>')[-1]) + '<|im_end|>' }}"
    "{% endgeneration %}{%- else %}{{- m.content + '<|im_end|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
FORGETFUL = MARKED.replace("m.content if loop.last else ", "")
TWICE = (
    Message("user", "2+2?"),
    Message("assistant", "4", reasoning="Easy."),
    Message("user", "3+3?"),
    Message("assistant", "6", reasoning="Hm."),
)
WRITTEN = [  # the same thoughts in the content
    replace(m, content=f"<think>\n{m.reasoning}\n</think>\n\n{m.content}", reasoning="")
    if m.reasoning
    else m
    for m in TWICE
]
PLAIN = (Message("user", "2+2?"), Message("assistant", "4"))


def codec(template="qwen3", source=None, **settings):
    tokenizer = tiny_tokenizers.tokenizer(chat_template=source)
    section = DataSection(datasets=("any",), template="auto" if source else template, **settings)
    return Codec(tokenizer, section_template(section, tokenizer), section)


def shown(made, messages, tools=()):
    """Each sequence with ⟦⟧ around what is trained on, or why there is none."""
    outcome = made.encode_chats([Example(tuple(messages), tools)])[0]
    return outcome.reason if isinstance(outcome, Dropped) else [_marked(made, i) for i in outcome]


def _marked(made, item):
    text, pairs = "", list(zip(*item.values(), strict=True))
    runs = [[pairs[0]]]
    for pair in pairs[1:]:
        is_same = (pair[1] == IGNORE_INDEX) == (runs[-1][-1][1] == IGNORE_INDEX)
        runs[-1].append(pair) if is_same else runs.append([pair])
    for run in runs:
        words = made.tokenizer.decode([token for token, _ in run])
        text += words if run[0][1] == IGNORE_INDEX else f"⟦{words}⟧"
    return text


FIRST = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
SECOND = "<|im_start|>user\n3+3?<|im_end|>\n<|im_start|>assistant\n"
OWN_SEQUENCES = [
    f"{FIRST}4<|im_end|>\n{SECOND}⟦<think>\nHm.\n</think>\n\n6<|im_end|>⟧",
    f"{FIRST}⟦<think>\nEasy.\n</think>\n\n4<|im_end|>⟧",
]


def stripped(texts):
    return sorted(text.rstrip("\n") for text in texts)


NAMED_OR_SAVED = pytest.mark.parametrize("source", [None, QWEN3])


@NAMED_OR_SAVED
def test_each_response_is_trained_with_its_thought_after_the_prompt_of_chat(source):
    made = codec(source=source)
    assert stripped(shown(made, TWICE)) == sorted(OWN_SEQUENCES)
    prompt = made.tokenizer.decode(made.encode_prompt(TWICE[:3]))
    assert prompt == f"{FIRST}4<|im_end|>\n{SECOND}"


@NAMED_OR_SAVED
def test_thoughts_in_the_content_are_the_same(source):
    made = codec(source=source)
    assert shown(made, WRITTEN) == shown(made, TWICE)


@pytest.mark.parametrize("settings", [{"template": "chatml"}, {"preserve_thinking": True}])
def test_without_a_field_for_thoughts_and_with_preserved_ones_all_are_in_one_sequence(settings):
    assert stripped(shown(codec(**settings), TWICE)) == [
        f"{FIRST}⟦<think>\nEasy.\n</think>\n\n4<|im_end|>⟧\n"
        f"{SECOND}⟦<think>\nHm.\n</think>\n\n6<|im_end|>⟧"
    ]


def test_a_marked_template_that_removes_earlier_thoughts_gives_each_response_a_sequence():
    found = shown(codec(source=MARKED), TWICE)
    assert sum("⟦<think>\nEasy.\n</think>\n\n4<|im_end|>⟧" in text for text in found) == 1
    assert sum("⟦<think>\nHm.\n</think>\n\n6<|im_end|>⟧" in text for text in found) == 1


def test_a_template_that_writes_no_thought_drops_the_row_and_says_what_to_do():
    reason = shown(codec(source=FORGETFUL), TWICE)
    assert "does not write the thought of a response" in reason
    assert "data.enable_thinking: false" in reason
    assert shown(codec(source=FORGETFUL), PLAIN)


@pytest.mark.parametrize("source", [None, QWEN3])
def test_without_thinking_the_empty_thought_is_in_the_prompt(source):
    made = codec(source=source, enable_thinking=False, mask_history=True)
    text = f"{FIRST}4<|im_end|>\n{SECOND}{EMPTY}⟦6<|im_end|>⟧"
    assert stripped(shown(made, TWICE)) == [text]
    written = [Message(m.role, f"<think>{m.reasoning}</think>\n{m.content}") for m in TWICE[1::2]]
    assert stripped(shown(made, [TWICE[0], written[0], TWICE[2], written[1]])) == [text]
    assert made.tokenizer.decode(made.encode_prompt(TWICE[:1])) == FIRST + EMPTY


@pytest.mark.parametrize("source", [None, QWEN3])
@pytest.mark.parametrize(
    ("trained", "plain", "thinking"),
    [
        ("all", f"⟦{EMPTY}4<|im_end|>⟧", "⟦<think>\nEasy.\n</think>\n\n4<|im_end|>⟧"),
        ("written", f"{EMPTY}⟦4<|im_end|>⟧", "⟦<think>\nEasy.\n</think>\n\n4<|im_end|>⟧"),
        ("none", f"{EMPTY}⟦4<|im_end|>⟧", "<think>\nEasy.\n</think>\n\n⟦4<|im_end|>⟧"),
    ],
)
def test_thoughts_are_trained_on_as_set(source, trained, plain, thinking):
    made = codec(source=source, train_on_thoughts=trained)
    assert stripped(shown(made, PLAIN)) == [FIRST + plain]
    assert stripped(shown(made, TWICE[:2])) == [FIRST + thinking]


def test_the_fingerprint_knows_the_settings_of_thoughts():
    settings = [{}, {"enable_thinking": True}, {"enable_thinking": False}]
    settings += [{"preserve_thinking": True}, {"train_on_thoughts": "none"}]
    assert len({codec(**each).fingerprint for each in settings}) == len(settings)


def test_thoughts_before_a_call_stay_until_the_next_question():
    call = {"name": "f", "arguments": {}}
    messages = [
        *TWICE[:1],
        Message("assistant", "", (call,), reasoning="Ask."),
        Message("tool", "4"),
    ]
    made = codec()
    assert "Ask." in made.tokenizer.decode(made.encode_prompt(messages))
    later = [*messages, Message("assistant", "4"), Message("user", "3+3?")]
    assert "Ask." not in made.tokenizer.decode(made.encode_prompt(later))


def test_words_around_thoughts_that_are_control_tokens_are_recognized():
    text = (
        "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>4"
    )
    tokenizer = tiny_tokenizers.tokenizer()
    words = ["<|channel|>", "<|message|>", "<|end|>", "<|start|>"]
    tokenizer.add_tokens(words, special_tokens=True)
    made = Codec(tokenizer, load_template("gpt_oss", tokenizer), DataSection(datasets=("any",)))
    (item,) = made.encode_chats([Example((TWICE[0], Message("assistant", text)))])[0]
    assert tokenizer.decode(item["input_ids"]).endswith(f"<|start|>assistant{text}</s>")
    assert tokenizer.convert_tokens_to_ids("<|channel|>") in item["input_ids"]


@pytest.mark.parametrize("source", [None, QWEN3])
def test_the_result_of_a_tool_continues_a_response_with_its_thought(source):
    made = codec(source=source.replace("loop.last", "thought") if source else None)
    turn = made.encode_turn(Message("tool", "4"))
    assert made.tokenizer.decode([turn.follows]) == "<|im_end|>"
    assert made.tokenizer.decode(turn.ids).endswith("<|im_end|>\n<|im_start|>assistant\n")
    if source is None:
        with pytest.raises(TemplateError, match="changes a response when another turn follows"):
            made.encode_turn(Message("user", "And then?"))


# Arguments of templates


def test_arguments_are_the_defaults_of_the_saved_template():
    made = codec(enable_thinking=False)
    made.tokenizer.chat_template = made.template.source
    asked = [{"role": "user", "content": "2+2?"}]
    ask = made.tokenizer.apply_chat_template
    assert ask(asked, add_generation_prompt=True, tokenize=False) == FIRST + EMPTY
    given = {"enable_thinking": True}
    assert ask(asked, add_generation_prompt=True, tokenize=False, **given) == FIRST


@pytest.mark.parametrize("value", ['lo\'w\n"x" é', 3, 0.5, True, False])
def test_any_argument_passes_through(value):
    source = "\nA" + QWEN3 + "{{- '|' ~ effort if effort is defined }}"
    made = codec(source=source, chat_template_kwargs={"effort": value})
    ids = made.encode_prompt(TWICE[:1])
    assert made.tokenizer.decode(ids) == f"\nA{FIRST}|{value}"


def test_an_argument_that_changes_nothing_is_refused():
    with pytest.raises(TemplateError, match=r"no argument 'enable_thinking', so data.enable_thin"):
        codec("chatml", enable_thinking=True)
    with pytest.raises(TemplateError, match=r"'enable_thinkin' \(did you mean enable_thinking"):
        codec("qwen3", chat_template_kwargs={"enable_thinkin": True})
    with pytest.raises(TemplateError, match=r"data.chat_template_kwargs.messages would change"):
        codec("qwen3", chat_template_kwargs={"messages": 1})


# Families


def glm(**settings):
    """A tokenizer with GLM's tokens, and what makes a codec of one of its families."""
    tokenizer = tiny_tokenizers.tokenizer()
    tokenizer.add_tokens(["[gMASK]", "<sop>", "<|system|>", "<|user|>"], special_tokens=True)
    tokenizer.add_tokens(["<|assistant|>", "<|observation|>"], special_tokens=True)
    section = DataSection(datasets=("any",), **settings)
    return tokenizer, lambda name: Codec(tokenizer, load_template(name, tokenizer), section)


def taught(tokenizer, item):
    """The tokens that a sequence has as labels."""
    return [tokenizer.decode([label]) for label in item["labels"] if label != IGNORE_INDEX]


def test_a_template_that_ends_the_last_turn_only_teaches_the_end_of_every_response():
    tokenizer = tiny_tokenizers.tokenizer()
    section = DataSection(datasets=("any",))
    made = Codec(tokenizer, load_template("fewshot", tokenizer), section)
    plain = tuple(Message(m.role, m.content) for m in TWICE)
    (item,) = made.encode_chats([Example(plain)])[0]
    assert "".join(taught(tokenizer, item)) == "4\n\n</s>6\n\n</s>"
    assert tokenizer.decode(item["input_ids"]).count("</s>") == 1
    short = made.with_section(replace(section, cutoff_len=len(item["input_ids"]) - 1))
    (cut,) = short.encode_chats([Example(plain)])[0].features
    assert "".join(taught(tokenizer, cut)) == "4\n\n</s>"
    with pytest.raises(TemplateError, match=r"data\.train_on_prompt: template 'fewshot'"):
        made.with_section(DataSection(datasets=("any",), train_on_prompt=True))


CALL_ADD = Message("assistant", "", ({"name": "add", "arguments": {"a": 2}},))
GLM_TURNS = (TWICE[0], CALL_ADD, Message("tool", "4"), Message("assistant", "4"))
GLM_TURNS = (*GLM_TURNS, Message("user", "3+3?"))


@pytest.mark.parametrize("name", ["glm4", "glm4_moe", "glm4_7", "chatglm3"])
def test_a_turn_of_glm_ends_in_the_role_of_the_next_one_as_the_released_models_end_it(name):
    tokenizer, codec_of = glm()
    tokenizer.add_tokens(["sop"], special_tokens=True)
    made = codec_of(name)
    ends = {"<|user|>", "<|observation|>"}
    assert ends <= {tokenizer.decode([token]) for token in made.stop_token_ids}
    last_call = Example((*GLM_TURNS, CALL_ADD))
    for example in (Example((*GLM_TURNS, Message("assistant", "6"))), last_call):
        learnt = [t for item in made.encode_chats([example])[0] for t in taught(tokenizer, item)]
        last = "<|observation|>" if example is last_call else "<|user|>"
        found = sorted(token for token in learnt if token in {*ends, "</s>"})
        assert found == sorted(["<|observation|>", "<|user|>", last])
    tokenizer.chat_template = made.template.source  # as it is saved with the weights
    assert ends <= set(load_template("auto", tokenizer).stop)


def test_a_prompt_of_glm_is_trained_as_it_says_when_to_stop():
    tokenizer, codec_of = glm(train_on_prompt=True)
    plain = tuple(Message(m.role, m.content) for m in TWICE)
    (item,) = codec_of("glm4").encode_chats([Example(plain)])[0]
    assert item["labels"] == item["input_ids"]
    assert tokenizer.decode(item["input_ids"]).endswith("6<|user|>")


@pytest.mark.parametrize(("role", "end"), [("user", "<|user|>"), ("tool", "<|observation|>")])
def test_an_environment_goes_on_behind_the_end_that_its_role_is(role, end):
    tokenizer, codec_of = glm()
    turn = codec_of("glm4").encode_turn(Message(role, "4"))
    assert tokenizer.decode([turn.follows]) == end
    assert tokenizer.decode(turn.ids) == "\n4<|assistant|>"


def test_another_syntax_of_tools_is_chosen_by_name():
    tools = ({"name": "f", "parameters": {"type": "object", "properties": {}}},)
    made = codec("smollm", tool_format="qwen")
    text = made.tokenizer.decode(made.encode_prompt(TWICE[:1], tools))
    assert "<tool_call>" in text
    assert "Action:" in codec("smollm").tokenizer.decode(
        codec("smollm").encode_prompt(TWICE[:1], tools)
    )
    with pytest.raises(TemplateError, match=r"got 'qwn' \(did you mean qwen\?\)"):
        codec("smollm", tool_format="qwn")
    with pytest.raises(TemplateError, match="template 'chatml' has its own syntax of tools"):
        codec("chatml", tool_format="qwen")


def test_a_saved_family_is_known_again_from_its_template():
    tokenizer, _ = glm()
    saved = load_template("glm4_moe", tokenizer, {"enable_thinking": False})
    tokenizer.chat_template = saved.source
    again = load_template("auto", tokenizer)
    assert replace(again, name=saved.name, stop=saved.stop) == saved
    assert set(saved.stop) <= set(again.stop)


def test_the_preview_shows_an_end_that_is_trained_without_being_written():
    from surefoot.data.text.preview import preview_example

    tokenizer = tiny_tokenizers.tokenizer()
    made = Codec(tokenizer, load_template("fewshot", tokenizer), DataSection(datasets=("any",)))
    plain = [Message(m.role, m.content) for m in TWICE]
    example = Example(tuple(plain))
    (outcome,) = made.encode_chats([example])
    (item,) = preview_example(made, example, outcome, outcome).items
    text = "".join(part.text for part in item.parts if part.learnt)
    assert text.count("</s>") == 2


# Thoughts that the prompt has opened

QWEN35 = QWEN3.replace(
    "{%- if '</think>' in", "{%- if '<think>' in content and '</think>' in"
).replace(
    "<|im_start|>assistant\n' }}{%- if enable",
    "<|im_start|>assistant\n' }}{{- '<think>\n' if enable_thinking is not defined }}{%- if enable",
)


SHORT = [Message(m.role, m.content.removeprefix("<think>\n")) for m in WRITTEN]


OPENED = [*(("auto", source) for source in (QWEN35, QWEN3, MARKED))]
OPENED += [(name, None) for name in ("qwen3", "qwen3_5", "chatml")]


@pytest.mark.parametrize(("template", "source"), OPENED)
def test_a_response_with_the_closing_word_alone_is_one_with_both(template, source):
    made = codec(template, source)
    assert shown(made, SHORT) == shown(made, WRITTEN)
    assert made.encode_prompt(SHORT[:3]) == made.encode_prompt(WRITTEN[:3])
    assert "<think>\nHm.\n</think>" in shown(made, SHORT)[0].replace("⟦", "")


@pytest.mark.parametrize("source", [None, QWEN35])
def test_without_thinking_a_thought_without_its_opening_word_is_removed(source):
    made = codec(source=source, enable_thinking=False)
    assert shown(made, SHORT) == shown(made, [Message(m.role, m.content) for m in TWICE])


def test_a_response_that_only_closes_a_thought_has_none():
    made = codec()
    assert shown(made, [TWICE[0], Message("assistant", "</think>\n\n4")]) == shown(made, PLAIN)


def test_a_closing_word_that_may_be_text_drops_the_row_and_a_quoted_one_is_text():
    made = codec("chatml")
    reason = shown(made, [TWICE[0], Message("assistant", "Write </think> after it.")])
    assert "write `</think>` in backticks if it is text" in reason
    (text,) = shown(made, [TWICE[0], Message("assistant", "Write `</think>` after it.")])
    assert "⟦Write `</think>` after it.<|im_end|>⟧" in text


@pytest.mark.parametrize(
    "answer", ["Write `</think>` after it.", "A" * 30 + " `</think>` " + "B" * 30]
)
@pytest.mark.parametrize("thought", ["", "<think>\nAn easy one.\n</think>\n\n"])
def test_a_template_that_removes_words_of_an_answer_drops_the_row(thought, answer):
    reason = shown(codec(source=QWEN3), [TWICE[0], Message("assistant", thought + answer)])
    assert reason == "the chat template changes a response"
