"""Every bundled template keeps the same promises, with tokenizers of every kind."""

import os
from pathlib import Path

import pytest

import tiny_tokenizers
from surefoot.batch import IGNORE_INDEX
from surefoot.data.example import Example, Message
from surefoot.data.section import DataSection
from surefoot.data.text.codec import Codec
from surefoot.data.text.templates import bundled, load_template

GOLDEN = Path(__file__).parent.parent / "golden" / "templates"
DOCS = Path(__file__).parent.parent.parent / "docs" / "templates.md"
SECTION = DataSection(datasets=("any",))
TOOL = {
    "name": "get_weather",
    "description": "Weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "City"}},
        "required": ["city"],
    },
}


def system(text):
    return Message("system", text)


def user(text):
    return Message("user", text)


def assistant(text, *calls):
    return Message("assistant", text, calls)


SILENCE = Message("assistant", "", learn=True)  # not an empty field, but an answer


CALL = {"name": "get_weather", "arguments": {"city": "Paris"}}
CALLS = (CALL, {"name": "get_weather", "arguments": {"city": "Rome"}})
CONVERSATIONS = {
    "single": Example((user("What is the capital of France?"), assistant("Paris."))),
    "multi": Example(
        (user("Hi"), assistant("Hello! How can I help?"), user("Add 2 and 3."), assistant("5"))
    ),
    "spaces": Example((user(" Thanks\n\n"), assistant("  x = 1\n"), user("\tand"), SILENCE)),
    "system": Example((system("You are terse."), user("Name a prime."), assistant("7"))),
    "tools": Example(
        (
            system("Help."),
            user("Weather in Paris?"),
            assistant("", CALL),
            Message("tool", '{"temp_c": 21}'),
            assistant("It is 21 °C in Paris."),
            user("And in Rome?"),
            assistant("Both at once.", *CALLS),
            Message("tool", '{"temp_c": 21}'),
            Message("tool", '{"temp_c": 25}'),
            assistant("25 °C in Rome."),
        ),
        (TOOL,),
    ),
}


@pytest.fixture(params=sorted(bundled()))
def name(request):
    return request.param


def dicts(messages):
    """What people give to apply_chat_template."""
    made = []
    for message in messages:
        made.append({"role": message.role, "content": message.content})
        if message.tool_calls:
            calls = [{"type": "function", "function": call} for call in message.tool_calls]
            made[-1]["tool_calls"] = calls
    return made


def their_prompt(tokenizer, messages, tools):
    """The prompt's ids as transformers makes them from the template saved with the tokenizer."""
    schemas = [{"type": "function", "function": tool} for tool in tools]
    return tokenizer.apply_chat_template(
        dicts(messages), tools=schemas or None, add_generation_prompt=True, return_dict=False
    )


def learnt(item):
    return [token for token, label in zip(*item.values(), strict=True) if label != IGNORE_INDEX]


@pytest.mark.parametrize("case", CONVERSATIONS)
@pytest.mark.parametrize("kind", tiny_tokenizers.KINDS)
def test_an_answer_stands_behind_the_prompt_that_chat_gives(name, kind, case):
    tokenizer = tiny_tokenizers.tokenizer(kind)
    codec = Codec(tokenizer, load_template(name, tokenizer), SECTION)
    tokenizer.chat_template = codec.template.source  # as the run saves it
    example = CONVERSATIONS[case]
    items = codec.encode_chats([example])[0]
    taught = []
    for i, message in enumerate(example.messages):
        if message.role == "assistant":
            prompt = their_prompt(tokenizer, example.messages[:i], example.tools)
            assert codec.encode_prompt(example.messages[:i], example.tools) == prompt
            assert any(_teaches(item, prompt) for item in items), f"message {i}"
            taught.append(len(prompt))
    ends = sum(learnt(item).count(codec.stop_token_ids[0]) for item in items)
    assert ends == len(taught), "each answer is taught once, with the token that ends it"


def _teaches(item, prompt):
    ids, labels = item["input_ids"], item["labels"]
    start = len(prompt)
    return ids[:start] == prompt and labels[start] == ids[start]


@pytest.mark.parametrize("kind", ["qwen", "metaspace"])
@pytest.mark.parametrize("case", ["single", "multi", "system", "tools"])
def test_only_answers_carry_labels(name, kind, case):
    tokenizer = tiny_tokenizers.tokenizer(kind)
    codec = Codec(tokenizer, load_template(name, tokenizer), SECTION)
    example = CONVERSATIONS[case]
    items = codec.encode_chats([example])[0]
    text = "".join(tokenizer.decode(learnt(item)) for item in items)
    for message in example.messages:
        if message.role == "assistant":
            assert message.content in text
        elif len(message.content) > 4:
            assert message.content not in text
    for item in items:
        assert item["labels"][0] == IGNORE_INDEX
        assert set(learnt(item)).isdisjoint({tokenizer.bos_token_id})


def test_the_ids_of_a_conversation_are_those_of_the_saved_template(name):
    tokenizer = tiny_tokenizers.tokenizer("qwen")
    codec = Codec(tokenizer, load_template(name, tokenizer), SECTION)
    tokenizer.chat_template = codec.template.source
    example = CONVERSATIONS["multi"]
    (item,) = codec.encode_chats([example])[0]
    theirs = tokenizer.apply_chat_template(
        dicts(example.messages), return_dict=True, return_assistant_tokens_mask=True
    )
    assert item["input_ids"] == theirs["input_ids"]
    is_learnt = [int(label != IGNORE_INDEX) for label in item["labels"]]
    assert is_learnt == theirs["assistant_masks"]


@pytest.mark.parametrize("case", CONVERSATIONS)
def test_the_rendered_text_is_as_it_was(name, case):
    """With ⟦⟧ around what is learnt. SUREFOOT_GOLDEN=write writes what is made now."""
    tokenizer = tiny_tokenizers.tokenizer("gpt2")
    codec = Codec(tokenizer, load_template(name, tokenizer), SECTION)
    found = "\n----\n".join(
        _marked(tokenizer, item) for item in codec.encode_chats([CONVERSATIONS[case]])[0]
    )
    path = GOLDEN / f"{name}.{case}.txt"
    if os.environ.get("SUREFOOT_GOLDEN") == "write":
        path.write_text(found + "\n", encoding="utf-8")
    assert found + "\n" == path.read_text(encoding="utf-8")


def _marked(tokenizer, item):
    text, was_learnt = "", False
    pieces, run = [], []
    for token, label in zip(*item.values(), strict=True):
        if (label != IGNORE_INDEX) != was_learnt:
            pieces.append(run)
            run, was_learnt = [], not was_learnt
        run.append(token)
    for number, piece in enumerate([*pieces, run]):
        words = tokenizer.decode(piece)
        text += f"⟦{words}⟧" if number % 2 else words
    return text


def test_nothing_is_said_that_nobody_said(name):
    """But for the words alpaca and vicuna begin with; they are these formats."""
    tokenizer = tiny_tokenizers.tokenizer("qwen")
    codec = Codec(tokenizer, load_template(name, tokenizer), SECTION)
    prompt = tokenizer.decode(codec.encode_prompt([user("QUESTION")]), skip_special_tokens=True)
    frame = {"alpaca": "Below is an instruction", "vicuna": "A chat between a curious user"}
    assert len(prompt) < 60 or prompt.startswith(frame[name])


def test_every_template_is_described_in_the_docs(name):
    assert bundled()[name].description
    assert bundled()[name].tools
    assert f"| `{name}`" in DOCS.read_text(encoding="utf-8")


def test_a_copy_of_a_template_needs_no_other_file(name):
    assert "include" not in bundled()[name].source.split("{#")[0]


OFFICIAL = {
    # what the families' own templates make of: system S, user A, assistant B, user C
    "chatml": "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nA<|im_end|>\n"
    "<|im_start|>assistant\nB<|im_end|>\n<|im_start|>user\nC<|im_end|>\n<|im_start|>assistant\n",
    "llama3": "<s><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nA<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nB<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nC<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "gemma": "<s><start_of_turn>user\nS\n\nA<end_of_turn>\n<start_of_turn>model\nB<end_of_turn>\n"
    "<start_of_turn>user\nC<end_of_turn>\n<start_of_turn>model\n",
    "mistral": "<s>[INST] S\n\nA[/INST] B</s>[INST] C[/INST]",
    "vicuna": "<s>S USER: A ASSISTANT: B</s>USER: C ASSISTANT:",
}


@pytest.mark.parametrize("official", OFFICIAL)
def test_a_family_s_conversations_look_as_the_family_writes_them(official):
    tokenizer = tiny_tokenizers.tokenizer("qwen")
    codec = Codec(tokenizer, load_template(official, tokenizer), SECTION)
    ids = codec.encode_prompt([system("S"), user("A"), assistant("B"), user("C")])
    assert tokenizer.decode(ids) == OFFICIAL[official]
