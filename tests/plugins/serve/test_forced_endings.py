"""A forced answer is one whole document of JSON, whatever the model would rather write."""

import json
import re
from types import SimpleNamespace

import pytest
import torch

from surefoot.generate.live import RowSettings, advanced
from surefoot.generate.responses import Chooser, OpenResponse, Request, decoder
from surefoot.generate.section import GenerateSection
from surefoot.plugins.serve.grammar import JsonSchema, ResponseFormat, grammar_of
from tiny_tokenizers import tokenizer

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")
from llguidance.hf import from_tokenizer  # noqa: E402

WORDS = {"type": "string"}
FLAT = {
    "type": "object",
    "properties": {"q": {"type": "number"}, "n": {"type": "integer"}, "s": WORDS},
    "required": ["q", "n"],
}
TREE = {
    "type": "object",
    "properties": {"name": WORDS, "children": {"type": "array", "items": {"$ref": "#"}}},
    "required": ["name"],
    "additionalProperties": False,
}
WIDE = {
    "type": "object",
    "properties": {
        "note": WORDS,
        **{name: {"type": "integer"} for name in ("first", "second", "third")},
        "deep": {"type": "object", "properties": {"kind": {"enum": ["tall one", "x"]}}},
        "list": {"type": "array", "items": FLAT, "minItems": 2},
    },
    "required": ["second", "deep", "third"],
}
CODE = {"type": "object", "properties": {"c": {"type": "string", "pattern": "^[a-z]{3}-[0-9]+$"}}}
LONG = {"type": "string", "minLength": 30}
SCHEMAS = {
    "any object": None,
    "flat": FLAT,
    "tree": TREE,
    "wide": WIDE,
    "pattern": {**CODE, "required": ["c"]},
    "list": {"type": "array", "items": {"anyOf": [WIDE, {"type": "null"}]}, "minItems": 1},
    "long text": {"type": "object", "properties": {"t": LONG}, "required": ["t"]},
    "bounds": {"type": "array", "items": {"type": "integer", "minimum": 10**15}, "minItems": 2},
    "number": {"type": "number"},
    "choice": {"enum": ["a long answer", "no", {"a": [1]}]},
}
WISHES = {  # what the model writes wherever it may
    "digits": "0123456789",
    "the end of no number": "0123456789eE.",
    "lists": "[",
    "objects": '{":ab, ',
    "text": "abcdefghij ",
    "backslashes": '\\"u0',
    "more items": ',"',
    "chance": "",
}
ROOM = 90  # tokens in which each has an ending


@pytest.fixture(scope="module")
def models():
    return {kind: model_of(kind) for kind in ("qwen", "llama2")}


def model_of(kind, template=None):
    own = tokenizer(kind)
    opened = SimpleNamespace(template=template, tokenizer=own)
    forced = from_tokenizer(own, n_vocab=len(own), eos_token=[own.eos_token_id])
    return SimpleNamespace(opened=opened, exactly=decoder(own), grammar_tokenizer=forced)


def constraints_of(model, schema, *, thinks=False):
    kind, given = ("json_object", None) if schema is None else ("json_schema", {"schema": schema})
    form = ResponseFormat(type=kind, json_schema=given and JsonSchema(**given))
    return grammar_of(model, SimpleNamespace(is_thinking=thinks), form)()


def answered(model, schema, wish, most, *, seed=0, thinks=False):
    """The text of a response of at most ``most`` tokens, and why it ends."""
    own = model.opened.tokenizer
    constraints = constraints_of(model, schema, thinks=thinks)
    section = GenerateSection(max_new_tokens=most, do_sample=not wish)
    chooser = Chooser(section, frozenset([own.eos_token_id]), has_logps=False)
    settings = RowSettings(chooser, model.exactly, constraints)
    row = OpenResponse(
        Request(0, (1,), most, "length", (seed,)),
        until=SimpleNamespace(push=lambda token: False, pop=lambda: "", end=lambda: ""),
    )
    dice = torch.Generator().manual_seed(seed)
    wishes = torch.tensor(
        [
            float(bool(text) and bool(wish) and set(text) <= set(wish))
            for text in (own.decode([number]) for number in range(len(own)))
        ]
    )
    while row.finish_reason is None:
        logits = torch.randn(len(own), generator=dice) + 20 * wishes
        advanced(logits[None], [row], {0: settings})
    ids = [number for number in row.ids if number != own.eos_token_id]
    return own.decode(ids), row.finish_reason


@pytest.mark.parametrize("schema", SCHEMAS)
def test_a_forced_answer_is_a_whole_document_whatever_the_model_writes(schema, models):
    for number, wish in enumerate(WISHES):
        kind = [*models][number % 2]
        text, reason = answered(models[kind], SCHEMAS[schema], WISHES[wish], ROOM, seed=number)
        assert reason == "stop", (kind, wish, text)
        jsonschema.validate(json.loads(text), SCHEMAS[schema] or {"type": "object"})


@pytest.mark.parametrize("schema", SCHEMAS)
def test_each_budget_that_has_room_for_the_shortest_way_has_a_document(schema, models):
    for kind, model in models.items():
        (constraint,) = constraints_of(model, SCHEMAS[schema])
        shortest = len(constraint.ending)
        for most in range(shortest - 1, shortest + 9, 2 if kind == "qwen" else 3):
            text, reason = answered(model, SCHEMAS[schema], WISHES["more items"], most, seed=most)
            assert reason == "stop" or most < shortest, (kind, most, text)
            jsonschema.validate(json.loads(text), SCHEMAS[schema] or {"type": "object"})


@pytest.mark.parametrize(
    ("schema", "shortest"),
    [
        (None, "{}"),
        (FLAT, '{"q":0,"n":0}'),
        (TREE, '{"name":""}'),
        (WIDE, '{"second":0,"third":0,"deep":{}}'),
        ({"type": "array", "items": WIDE}, "[]"),
        ({"enum": ["a long answer", "no"]}, '"no"'),
    ],
)
def test_the_way_to_the_end_is_short(schema, shortest, models):
    for model in models.values():
        (constraint,) = constraints_of(model, schema)
        text = model.opened.tokenizer.decode(constraint.ending[:-1]).strip()
        assert re.sub("[0-9]", "0", text).replace(", ", ",").replace(": ", ":") == shortest


def test_a_number_is_one_that_int64_or_float64_has(models):
    for wish in ("digits", "the end of no number"):
        for seed in range(5):
            text, _ = answered(models["qwen"], {"type": "number"}, WISHES[wish], 100, seed=seed)
            assert float("-inf") < json.loads(text) < float("inf")
            assert all(len(digits) <= 19 for digits in re.findall("[0-9]+", text)), text
    assert re.fullmatch("[0-9]{19}", answered(models["qwen"], {"type": "integer"}, "123", 99)[0])
    assert len(answered(models["qwen"], {"const": 10**30}, "123", 99)[0]) == 31  # it is wanted


def test_a_thought_ends_in_time_for_the_form(models):
    model = models["qwen"]
    template = SimpleNamespace(thoughts=("<think>", "</think>"))
    model = SimpleNamespace(
        **{
            **vars(model),
            "opened": SimpleNamespace(tokenizer=model.opened.tokenizer, template=template),
        }
    )
    for wish in (WISHES["text"], ""):  # by chance, it ends before its form has begun
        for most in (60, 100):
            text, reason = answered(model, FLAT, wish, most, seed=most, thinks=True)
            thought, end, form = text.partition("</think>")
            assert thought
            assert end
            assert reason == "stop"
            jsonschema.validate(json.loads(form), FLAT)
