"""Sections, variants and settings read from plain data; nothing here needs torch."""

import dataclasses
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, Protocol

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.errors import DataError, RecipeError
from surefoot.schema import (
    Problem,
    Variants,
    describe,
    dotted,
    expand,
    json_schema,
    paths,
    read,
    settings,
    write,
)


class Method(Protocol):
    pass


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Low rank."""

    rank: int = 8
    """Rank of the update,
    ``r`` in the paper."""
    alpha: float | None = None
    targets: tuple[str, ...] = ("all",)
    """Modules to adapt."""

    def __post_init__(self):
        if self.rank < 1:
            raise ValueError(f"rank must be at least 1, got {self.rank}")


@dataclass(frozen=True, kw_only=True)
class Full:
    """Everything."""


@dataclass(frozen=True, kw_only=True)
class Prune:
    keep: float


CHOICES = {"full": Full, "lora": Lora, "prune": Prune}


@dataclass(frozen=True, kw_only=True)
class Train:
    """How long."""

    output_dir: Path
    steps: int = 10
    rate: float = 0.5
    schedule: Literal["cosine", "linear"] = "cosine"
    is_fast: bool = False
    notes: str = ""
    sizes: tuple[int, ...] = field(default_factory=tuple)

    def __post_init__(self):
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}")
        if self.rate > 1 and self.is_fast:
            raise ValueError("a high rate and is_fast exclude each other")
        if self.notes == "bad":
            raise ValueError("notes: say something nice")


@dataclass(frozen=True, kw_only=True)
class Other:
    limit: int | None = 3
    learning_rate: float = 0.1


@dataclass(frozen=True, kw_only=True)
class Root:
    """The whole."""

    train: Train
    method: Annotated[Method, Variants(CHOICES)] = Full()
    other: Other = Other()


GOOD = {"train": {"output_dir": "runs/x"}}


def problems(data, cls=Root):
    with pytest.raises(RecipeError) as caught:
        read(cls, data)
    return str(caught.value).splitlines()


def train(**fields):
    return {"train": {"output_dir": "x", **fields}}


def test_sections_variants_and_defaults_are_read():
    data = {"train": {"output_dir": "runs/x", "steps": 3}, "method": {"lora": {"rank": 4}}}
    assert read(Root, data) == Root(
        train=Train(output_dir=Path("runs/x"), steps=3), method=Lora(rank=4)
    )


@pytest.mark.parametrize("short", ["lora", {"lora": None}, {"lora": {}}, Lora()])
def test_a_variant_may_be_named_alone(short):
    assert read(Root, {**GOOD, "method": short}).method == Lora()


def test_one_item_stands_for_a_list_of_one():
    data = {**train(sizes=3), "method": {"lora": {"targets": "q_proj"}}}
    assert read(Root, data).train.sizes == (3,)
    assert read(Root, data).method.targets == ("q_proj",)


def test_null_is_a_section_of_defaults_or_unsets_what_may_be_unset():
    assert read(Root, {**GOOD, "other": None}).other == Other()
    assert read(Root, {**GOOD, "other": {"limit": None}}).other.limit is None


def test_an_integer_does_for_a_number_and_becomes_one():
    rate = read(Root, train(rate=1)).train.rate
    assert rate == 1.0
    assert type(rate) is float


def test_dataclasses_and_paths_are_data_too():
    section = Train(output_dir=Path("runs/x"), sizes=(1, 2))
    assert read(Root, {"train": section, "other": Other(limit=1)}) == Root(
        train=section, other=Other(limit=1)
    )
    assert read(Root, Root(train=section)) == Root(train=section)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("steps", "8", "expected an integer, got '8'"),
        ("steps", True, "expected an integer, got true"),
        ("steps", 8.0, "expected an integer, got 8.0"),
        ("steps", None, "expected an integer, got null"),
        ("steps", [1], "expected an integer, got [1]"),
        ("rate", "1e-4", "expected a number, got '1e-4'"),
        ("rate", False, "expected a number, got false"),
        ("rate", math.inf, "expected a number, got Infinity"),
        ("rate", math.nan, "expected a number, got NaN"),
        ("rate", 10**400, "expected a number, got " + "1" + "0" * 56 + "..."),
        ("is_fast", "yes", "expected true or false, got 'yes'"),
        ("is_fast", 1, "expected true or false, got 1"),
        ("notes", 3, "expected text, got 3"),
        ("output_dir", 3, "expected a path, got 3"),
        ("output_dir", None, "expected a path, got null"),
        ("sizes", {"a": 1}, 'expected a list of integers, got {"a": 1}'),
        ("schedule", 3, "expected one of cosine, linear, got 3"),
        (
            "schedule",
            "cosin",
            "expected one of cosine, linear, got 'cosin' (did you mean cosine?)",
        ),
    ],
)
def test_a_wrong_value_is_shown_with_what_was_expected(name, value, expected):
    assert problems(train(**{name: value})) == [f"train.{name}: {expected}"]


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ({"learning_rate": 1}, "learning_rate: unknown key (did you mean other.learning_rate?)"),
        (
            {**train(rank=3), "method": "lora"},
            "train.rank: unknown key (did you mean method.lora.rank?)",
        ),
        ({"method": {"full": {"x": 1}}}, "method.full.x: unknown key; no keys are expected here"),
        ({"other": {"zzz": 1}}, "other.zzz: unknown key; expected one of limit, learning_rate"),
        (
            {"other": {"Learning-Rate": 1}},
            "other.Learning-Rate: unknown key (did you mean other.learning_rate?)",
        ),
        ({"method": "prune"}, "method.prune.keep: missing; expected a number"),
        (train(steps=0), "train.steps: must be at least 1, got 0"),
        (train(notes="bad"), "train.notes: say something nice"),
        (train(rate=2, is_fast=True), "train: a high rate and is_fast exclude each other"),
    ],
)
def test_a_problem_is_named_by_its_place_with_the_nearest_key_or_all_keys(data, problem):
    assert problems({**GOOD, **data}) == [problem]
    assert "did you mean" not in problems(train(rank=3))[0]  # of a method that was not chosen


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("lroa", "got 'lroa' (did you mean lora?)"),
        ({"lroa": {"rank": 3}}, "got 'lroa' (did you mean lora?)"),
        ({"rank": 3}, "got 'rank' (did you mean method.lora.rank?)"),
        ("ranks", "got 'ranks'"),  # a variant is never named as a setting of another section
        ({"full": None, "lora": None}, "got full and lora"),
        ({}, "got none of them"),
        (3, "got 3"),
        (None, "got null"),
    ],
)
def test_a_wrong_variant_is_shown_with_the_choices(value, expected):
    assert problems({**GOOD, "method": value}) == [
        f"method: expected one of full, lora, prune, {expected}"
    ]


def test_a_variant_may_be_added_after_a_section_was_read(monkeypatch):
    @dataclass(frozen=True, kw_only=True)
    class Late:
        size: int = 2

    read(Root, GOOD)
    monkeypatch.setitem(CHOICES, "late", Late)
    assert read(Root, {**GOOD, "method": {"late": {"size": 3}}}).method == Late(size=3)
    assert problems({**GOOD, "method": "late", "size": 3}) == [
        "size: unknown key (did you mean method.late.size?)"
    ]


def test_what_is_no_plain_data_is_refused():
    assert problems(train(notes=object())) == [
        "train.notes: expected plain data, got an object of type object; surefoot.train has "
        "arguments for objects"
    ]
    loop = {}
    loop["x"] = loop
    assert problems(train(notes=loop)) == ["not plain data: Circular reference detected"]
    assert "not plain data" in problems(train(notes="\ud800"))[0]


def test_the_caller_chooses_the_error():
    with pytest.raises(DataError, match=r"^1 problem\(s\)$"):
        read(Root, {}, fail=lambda found: DataError(f"{len(found)} problem(s)"))


def test_short_forms_are_written_out():
    data = {"train": {"sizes": 1}, "method": "lora", "other": None, "x": Path("y")}
    assert expand(Root, data) == {
        "train": {"sizes": [1]},
        "method": {"lora": {}},
        "other": {},
        "x": "y",
    }


def test_settings_know_type_default_and_docstring():
    known = settings(Lora)
    assert list(known) == ["rank", "alpha", "targets"]
    assert known["rank"].doc == "Rank of the update, `r` in the paper."
    assert known["alpha"].doc == ""
    assert known["rank"].default == 8
    assert settings(Train)["output_dir"].is_required
    assert settings(Train)["sizes"].default == ()
    assert settings(Root)["method"].expected == "one of full, lora, prune"


def test_a_class_without_source_has_no_docstrings():
    made = dataclasses.make_dataclass("Made", [("x", int, 3)], frozen=True)
    assert settings(made)["x"].doc == ""


def test_types_are_told_in_words():
    assert describe(int | None) == "an integer or null"
    assert describe(tuple[str, ...]) == "a list of text"
    assert describe(tuple[Literal["a", "b"], ...]) == "a list of any of a, b"
    assert describe(dict[str, int]) == "dict[str, int]"


def test_paths_are_written_with_dots_and_indices():
    assert dotted(("data", "datasets", 0)) == "data.datasets[0]"
    assert dotted(("a", "", "b\n")) == "a.''.'b\\n'"
    assert str(Problem((), "bad")) == "bad"
    assert ("method", "lora", "rank") in paths(Root)
    assert ("method", "full") in paths(Root)


NAMES = st.text(st.characters(codec="utf-8"), min_size=1)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
ROOTS = st.builds(
    Root,
    train=st.builds(
        Train,
        output_dir=st.from_regex(r"[a-zA-Z0-9_][a-zA-Z0-9_./ -]{0,20}", fullmatch=True).map(Path),
        steps=st.integers(1, 2**70),
        rate=st.floats(0, 1),
        schedule=st.sampled_from(["cosine", "linear"]),
        is_fast=st.booleans(),
        notes=NAMES.filter(lambda text: text != "bad"),
        sizes=st.lists(st.integers(-(2**70), 2**70)).map(tuple),
    ),
    method=st.one_of(
        st.just(Full()),
        st.builds(Prune, keep=FINITE),
        st.builds(
            Lora,
            rank=st.integers(1),
            alpha=st.none() | FINITE,
            targets=st.lists(NAMES).map(tuple),
        ),
    ),
    other=st.builds(Other, limit=st.none() | st.integers(), learning_rate=FINITE),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text() | st.sampled_from(["rank", "lora", "x"]), inner, max_size=4)
    ),
    max_leaves=8,
)


def near(cls):
    """Mappings that look like the section ``cls``, with anything as values."""
    keys = st.sampled_from([str(way[-1]) for way in paths(cls)])
    return st.recursive(JSON, lambda inner: st.dictionaries(keys, inner, max_size=5), max_leaves=20)


@given(ROOTS)
def test_what_is_written_reads_back_equal(root):
    assert read(Root, write(root)) == root
    assert read(Root, json.loads(json.dumps(write(root)))) == root


@given(near(Root))
def test_nonsense_gives_nothing_but_a_recipe_error(data):
    try:
        value = read(Root, data)
    except RecipeError as error:
        assert str(error)
    else:
        assert read(Root, write(value)) == value


@given(near(Root))
def test_the_json_schema_accepts_what_is_read(data):
    try:
        read(Root, data)
    except RecipeError:
        return
    assert conforms(data, json_schema(Root))


@given(ROOTS)
def test_the_json_schema_accepts_what_is_written(root):
    assert conforms(json.loads(json.dumps(write(root))), json_schema(Root))


def test_the_json_schema_refuses_unknown_keys_wrong_types_and_two_variants():
    schema = json_schema(Root)
    assert conforms(GOOD, schema)
    for data in (
        {},
        {**GOOD, "x": 1},
        train(steps="8"),
        train(steps=True),
        train(schedule="cosin"),
        train(sizes=["a"]),
        {**GOOD, "method": "prune"},
        {**GOOD, "method": {"full": {}, "lora": {}}},
        {**GOOD, "other": {"limit": 1.5}},
    ):
        assert not conforms(data, schema), data


def test_the_json_schema_says_what_settings_are_for_and_their_defaults():
    schema = json_schema(Root)["properties"]
    assert schema["method"]["default"] == "full"
    rank = schema["method"]["anyOf"][1]["properties"]["lora"]["properties"]["rank"]
    assert rank == {
        "type": "integer",
        "description": "Rank of the update, `r` in the paper.",
        "default": 8,
    }


TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "null": type(None),
}


def conforms(data, schema):
    """Whether ``data`` fits ``schema``: the keywords of JSON Schema that ours uses, no others."""
    known = {"$schema", "title", "description", "default", "type", "enum", "anyOf", "items"}
    known |= {"properties", "required", "additionalProperties", "minProperties", "maxProperties"}
    assert schema.keys() <= known
    kinds = schema.get("type", [])
    kinds = kinds if isinstance(kinds, list) else [kinds]
    return (
        (not kinds or any(is_of(data, kind) for kind in kinds))
        and ("enum" not in schema or data in schema["enum"])
        and ("anyOf" not in schema or any(conforms(data, s) for s in schema["anyOf"]))
        and (not isinstance(data, list) or all(conforms(x, schema.get("items", {})) for x in data))
        and (not isinstance(data, dict) or conforms_as_object(data, schema))
    )


def is_of(data, kind):
    if kind in ("integer", "number"):
        return isinstance(data, (int,) if kind == "integer" else (int, float)) and not isinstance(
            data, bool
        )
    return isinstance(data, TYPES[kind])


def conforms_as_object(data, schema):
    properties = schema.get("properties", {})
    return (
        all(name in data for name in schema.get("required", ()))
        and (schema.get("additionalProperties", True) or data.keys() <= properties.keys())
        and schema.get("minProperties", 0) <= len(data) <= schema.get("maxProperties", len(data))
        and all(conforms(data[name], s) for name, s in properties.items() if name in data)
    )
