"""The families beside LLaMA-Factory's templates, token for token; what differs, differs on purpose.

``record_llamafactory.py`` recorded the ids and labels with their code. ``DIFFERENT`` lists what
differs, with the reason; docs/templates.md explains each.
"""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest
import template_cases as cases

from surefoot.batch import IGNORE_INDEX
from surefoot.data.example import Dropped, Example, Message
from surefoot.data.section import DataSection
from surefoot.data.text.codec import Codec
from surefoot.data.text.families import families
from surefoot.data.text.templates import section_template
from surefoot.plugins.migrate.templates import masks_line_break

DOCS = Path(__file__).parent.parent.parent / "docs" / "templates.md"
ALL = "default last off off_all open"
PLAIN = "single system multi chinese"
TOOLS = "tools no_system parallel called"
THINKING = "thought thoughts some"
QWEN = "keye_vl qwen3 qwen3_omni qwen3_vl qwen3_5 qwen3_6"
GLM = "glm4_moe glm4v glm4_5v glmz1"
DIFFERENT = {  # reason -> families, and pairs of cases and modes
    "no blank lines before tools without a system message": (
        f"{QWEN} qwen3_nothink qwen3_omni_nothink qwen3_vl_nothink qwen3_5_nothink"
        " glm4_moe glm4_7 glm4_5v",
        ("no_system", ALL),
    ),
    "the thought before a call stays until the next question": (
        f"{QWEN} {GLM} deepseekr1 hy3 kimi_vl mimo mimo_v2 mimo_vl glm4_7 aeva seed_oss youtu"
        " minimax2 gemma4 gemma4n ernie_vl gpt_oss",
        ("called", "last open"),
    ),
    "no date before tools": ("llama4 mllama llava_next_llama3", (TOOLS, ALL)),
    "a call ends in the token that ends a turn": ("youtu gemma4 gemma4n", (TOOLS, ALL)),
    "a call is written as its family writes it": (
        "glm4_moe glm4_5v glm4_7 aeva minimax2 seed_oss gemma4 gemma4n",
        (TOOLS, ALL),
    ),
    "an answer after a result of a tool has its whole header": (
        "granite4",
        ("tools no_system", ALL),
    ),
    "a header is never part of a response": ("ernie_vl", (f"{PLAIN} {TOOLS} {THINKING}", ALL)),
    "an answer without its thought is in the channel for answers": (
        "gpt_oss",
        ("multi chinese tools no_system called thoughts some", ALL),
    ),
    "a prompt begins with its first token": ("phi_small", (f"{PLAIN} {TOOLS}", ALL)),
    "nothing is trained behind the token that stops": (
        "dots_ocr gemma2",
        (f"{PLAIN} {TOOLS}", ALL),
    ),
    "a conversation is tokenized as one text": (
        "breeze ernie_nothink deepseekcoder glm4_moe glm4v glm4_5v glmz1",
        ("chinese tools no_system", "default last"),
    ),
    "a response is tokenized as one text": (
        "deepseekcoder glm4_moe glm4v glm4_5v glmz1",
        (f"{PLAIN} some", "default last"),
        ("thoughts some called multi tools", "off_all"),
        ("called", "default"),
    ),
    "a response that begins with a line break is tokenized as one text": (
        "deepseekcoder",
        ("parallel", "default last"),
    ),
}
# What ends a turn there is eos, which the released models do not write.
NEXT_ROLE = "a turn ends in the role of the next one"
NEXT_ROLE_FAMILIES = "chatglm3 glm4 glm4_moe glm4v glm4_5v glm_ocr glm4_7 glmz1 aeva"
NEWLINES = {}
RECORD = Path(__file__).with_name("llamafactory_templates.json.gz")


@pytest.fixture(scope="module")
def theirs():
    found = json.loads(gzip.decompress(RECORD.read_bytes()))
    return {key: found["encodings"][number] for key, number in found["cases"].items()}


@pytest.fixture(scope="module")
def tokenizer():
    made = cases.tokenizer()
    NEWLINES.update({i: True for word, i in made.get_vocab().items() if set(word) == {"Ċ"}})
    return made


def message(role, content):
    """One of their messages."""
    if role != cases.F:
        return Message({cases.U: "user", cases.A: "assistant", cases.O: "tool"}[role], content)
    start = content.index("[{")
    return Message("assistant", content[:start], tuple(json.loads(content[start:])))


def section(family, mode):
    """The settings of a mode; what LLaMA-Factory trains on has all thoughts."""
    given = cases.MODES[mode]
    is_last = given.get("mask_history", False)
    thinks = given.get("enable_thinking", True)
    return DataSection(
        datasets=("any",),
        cutoff_len=100_000,
        template=family.name,
        default_system=family.default_system,
        mask_history=is_last,
        enable_thinking=thinks is not False if family.thoughts else None,
        preserve_thinking=bool(family.thoughts) and not is_last,
        train_on_thoughts="all" if thinks is not None else "written",
    )


def example(family, case):
    """A case as a row of data."""
    words = family.thoughts or ("<think>\n", "\n</think>\n\n")
    system, turns, tools = cases.conversation(case, words)
    first = [Message("system", system)] if system else []
    return Example((*first, *(message(*turn) for turn in turns)), tuple(tools))


def next_roles(family, case, tokenizer):
    """What ends the turns of a case where they have eos: what ends the last one, and all of them;
    None if it is eos here, too."""
    if family.name not in NEXT_ROLE_FAMILIES.split():
        return None
    roles = tokenizer.convert_tokens_to_ids(["<|user|>", "<|observation|>"])
    turns = cases.conversation(case, family.thoughts or ("", ""))[1]
    return roles[turns[-1][0] == cases.F], roles, tokenizer.eos_token_id


def difference(family, mode, outcome, their, ends):
    """None if the ids and labels are theirs, but for the ends of turns; else what differs."""
    if isinstance(outcome, Dropped) or "error" in their:
        return None if isinstance(outcome, Dropped) and "error" in their else "refused"
    if len(outcome) > 1:
        return "sequences"
    ids, labels = outcome[0]["input_ids"], outcome[0]["labels"]
    expected_ids = their["ids"]
    if ends:
        assert expected_ids[-1] == ends[2]
        expected_ids = [*expected_ids[:-1], ends[0]]
    if ids != expected_ids:
        return "ids"
    expected = [IGNORE_INDEX] * len(ids)
    for start, run in their["labels"]:
        expected[start : start + len(run)] = run
    expected = masked(family, mode, ids, labels, expected)
    if ends:
        pairs = zip(ids, expected, strict=True)
        expected = [i if label == ends[2] and i in ends[1] else label for i, label in pairs]
    return None if labels == expected else "labels"


def masked(family, mode, ids, labels, theirs):
    """Their labels without those that are masked here in every template: white space after the end
    of a turn, and with mask_history the ends of earlier turns."""
    is_last = cases.MODES[mode].get("mask_history")
    found = list(theirs)
    for i, label in enumerate(labels):
        is_end = family.ends_once and is_last and theirs[i] != ids[i]
        if label == IGNORE_INDEX and (is_end or NEWLINES.get(ids[i])):
            found[i] = IGNORE_INDEX
    return found


def differences(tokenizer, theirs, name):
    """The cases of a family that differ, as (case, mode)."""
    family, found, codecs = families()[name], set(), {}
    for case, mode in cases.of_family(family):
        settings = section(family, mode)
        template = section_template(settings, tokenizer)
        codec = codecs.setdefault(template.source, Codec(tokenizer, template, settings))
        outcome = codec.with_section(settings).encode_chats([example(family, case)])[0]
        ends = next_roles(family, case, tokenizer)
        if difference(family, mode, outcome, theirs[f"{name} {case} {mode}"], ends):
            found.add((case, mode))
    return found


def expected(name):
    """What ``DIFFERENT`` lists for a family."""
    asked = set(cases.of_family(families()[name]))
    rows = [what for names, *what in DIFFERENT.values() if name in names.split()]
    rules = [rule for row in rows for rule in row]
    pairs = {(c, m) for which, modes in rules for c in which.split() for m in modes.split()}
    return asked & pairs


def test_the_line_break_is_noted_where_theirs_trains_one(tokenizer, theirs):
    """By their labels: the last one of a response is white space."""
    wrong = []
    for name in families():
        runs = theirs[f"{name} single default"]["labels"]
        last = runs[-1][1][-2 if name == "gemma2" else -1]  # an eos token is behind Gemma 2's
        if masks_line_break(name) != bool(NEWLINES.get(last)):
            wrong.append(name)
    assert wrong == []


def shapes():
    """One family of each shape."""
    found = {replace(f, name="", default_system=None): name for name, f in families().items()}
    return sorted(found.values())


FEW = [name for name in shapes() if not families()[name].thoughts]
FEW += ["qwen3", "glm4_moe", "gpt_oss"]


@pytest.mark.parametrize("name", FEW)
def test_a_family_s_tokens_are_theirs_but_for_the_listed_ones(tokenizer, theirs, name):
    assert differences(tokenizer, theirs, name) == expected(name)


@pytest.mark.proof
@pytest.mark.parametrize("name", sorted(families().keys() - set(FEW)))
def test_every_family_s_tokens_are_theirs_but_for_the_listed_ones(tokenizer, theirs, name):
    assert differences(tokenizer, theirs, name) == expected(name)


@pytest.mark.parametrize("reason", [*DIFFERENT, NEXT_ROLE])
def test_each_difference_is_explained_in_the_docs(reason):
    names = (NEXT_ROLE_FAMILIES if reason == NEXT_ROLE else DIFFERENT[reason][0]).split()
    row = next(line for line in DOCS.read_text("utf-8").splitlines() if f"| {reason} |" in line)
    assert all(f"`{name}`" in row for name in names)
