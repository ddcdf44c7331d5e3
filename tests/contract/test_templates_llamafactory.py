"""Our templates beside LLaMA-Factory's, token for token. What differs, differs on purpose.

The differences are listed here, as what must be done to its text to get ours, and explained in
docs/templates.md. One holds everywhere: the line break after an end-of-turn token is not learnt.
"""

import json
import re

import pytest
from transformers import AutoTokenizer

from surefoot.batch import IGNORE_INDEX
from surefoot.data.example import Example, Message
from surefoot.data.section import DataSection
from surefoot.data.text.codec import Codec
from surefoot.data.text.templates import Template, bundled
from surefoot.plugins.migrate.templates import masks_line_break, same_template

NAMES = ("chatml", "qwen", "llama3", "mistral", "gemma", "alpaca", "vicuna", "default", "empty")
CASES = ("single", "system", "multi", "multi_system_zh", "think", "tools")
MODES = ("default", "mask_history")
OWN_TOOLS = ("qwen", "llama3", "mistral")  # the others have our generic form, it has its own
TOOLS = (
    {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "City"}},
            "required": ["city"],
        },
    },
)
CALL = {"name": "get_weather", "arguments": {"city": "Paris"}}
TOOL_MESSAGES = (
    Message("user", "Weather in Paris?"),
    Message("assistant", "", (CALL,)),
    Message("tool", '{"temp_c": 21}'),
    Message("assistant", "It is 21 °C in Paris."),
)
CHANGES = {  # name -> pattern in its text, what we write there
    "llama3": [(r"Cutting Knowledge Date: .*\nToday Date: .*\n\n", "")],
    "mistral": [
        (r"\[INST\] (\[AVAILABLE_TOOLS\].*\[/AVAILABLE_TOOLS\])\n\n", r"\1[INST] "),
    ],
    "alpaca": [(r"\A", "<s>"), (r"(?<!\n)### Instruction", "\n\n### Instruction")],
    "vicuna": [
        (r"\A", "<s>"),
        (r"(?<!>)USER:", " USER:"),
        (r"ASSISTANT:", "ASSISTANT: "),
    ],
    "default": [(r"\A", "<s>")],
    "empty": [(r"\A", "<s>")],
}


@pytest.fixture(scope="module")
def tokenizer(request):
    folder = request.config.rootpath.parent / "shared" / "fixtures" / "llamafactory"
    if not folder.is_dir():
        pytest.skip("needs ../shared/fixtures/llamafactory, the token ids of LLaMA-Factory")
    return AutoTokenizer.from_pretrained(folder / "tokenizer")


@pytest.fixture(scope="module")
def theirs(request, tokenizer):
    folder = request.config.rootpath.parent / "shared" / "fixtures" / "llamafactory"
    return json.loads((folder / "encodings.json").read_text(encoding="utf-8"))


def conversation(theirs, case):
    """The messages of a case, read back from a rendering that keeps them as they are."""
    if case == "tools":
        return Example(TOOL_MESSAGES, TOOLS)
    text = theirs["chatml"][f"{case}/default"]["text"]
    turns = re.findall(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>\n", text, re.DOTALL)
    return Example(tuple(Message(role, content) for role, content in turns))


def encoded(tokenizer, name, example, **settings):
    own, system = same_template(name)
    found = bundled()["chatml" if own == "qwen" else own]
    template = Template(name, found.source, found.stop or (tokenizer.eos_token,))
    section = DataSection(datasets=("any",), default_system=system, **settings)
    (item,) = Codec(tokenizer, template, section).encode_chats([example])[0]
    return item


def runs(tokenizer, item):
    """The texts that are learnt, one for each stretch of labels."""
    pieces, last = [], IGNORE_INDEX
    for label in item["labels"]:
        if label != IGNORE_INDEX:
            if last == IGNORE_INDEX:
                pieces.append([])
            pieces[-1].append(label)
        last = label
    return [tokenizer.decode(piece) for piece in pieces]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", NAMES)
def test_our_text_is_theirs_but_for_the_listed_differences(tokenizer, theirs, name, case, mode):
    if case == "tools" and name not in OWN_TOOLS:
        pytest.skip("this family has no form for tools; ours is Qwen's, theirs their own")
    item = encoded(tokenizer, name, conversation(theirs, case), mask_history=mode == "mask_history")
    their = theirs[name][f"{case}/{mode}"]
    expected = their["text"]
    for pattern, ours in CHANGES.get(name, ()):
        expected = re.sub(pattern, ours, expected)
    learnt = [text.rstrip("\n") for text in their["trained_text"]]
    if name == "empty":  # theirs never learns to stop
        for answer in dict.fromkeys(theirs[name][f"{case}/default"]["trained_text"]):
            expected = expected.replace(answer, answer + "</s>")
        learnt = [text + "</s>" for text in their["trained_text"]]
    if name == "vicuna":
        learnt = [" " + text for text in learnt]
    assert tokenizer.decode(item["input_ids"]) == expected
    assert runs(tokenizer, item) == learnt


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["chatml", "qwen", "llama3", "mistral", "gemma"])
def test_without_a_difference_in_text_the_tokens_are_theirs(tokenizer, theirs, name, case, mode):
    if case == "tools" and name != "qwen":
        pytest.skip("differs in text")
    item = encoded(tokenizer, name, conversation(theirs, case), mask_history=mode == "mask_history")
    their = theirs[name][f"{case}/{mode}"]
    assert item["input_ids"] == their["input_ids"]
    newline = tokenizer.encode("\n")
    for i, (our_label, label) in enumerate(zip(item["labels"], their["labels"], strict=True)):
        is_after_the_end = [label] == newline and item["labels"][i - 1] == item["input_ids"][i - 1]
        assert our_label == label or (is_after_the_end and our_label == IGNORE_INDEX)


@pytest.mark.parametrize("name", NAMES)
def test_the_line_break_is_noted_where_theirs_trains_one(tokenizer, theirs, name):
    trained = theirs[name]["single/default"]["trained_text"][-1]
    assert masks_line_break(name) == trained.endswith("\n")
