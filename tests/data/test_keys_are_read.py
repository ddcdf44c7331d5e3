"""Every key of a row is read, or named: each is changed, removed or planted, in every format."""

import copy
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import pictures
import tiny_tokenizers
from surefoot.data.example import BrokenRow, Dropped, Message, items_of
from surefoot.data.rows.formats import FORMATS
from surefoot.data.rows.formats._alpaca import Alpaca
from surefoot.data.rows.registry import read_entry
from surefoot.data.rows.rows import read_examples
from surefoot.data.section import DataSection
from surefoot.data.text.codec import Codec
from surefoot.data.text.templates import Template, load_template
from surefoot.errors import DataError, TemplateError
from surefoot.recipe.recipe_data import open_codec, reading_of
from surefoot.stages import STAGES

# A template that writes of a conversation what most do: one system message, names, thoughts of
# nobody, calls with their arguments, tools in full.
SOURCE = (
    "{% if tools %}<|im_start|>tools {{ tools | tojson }}<|im_end|> {% endif %}"
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}<|im_start|>{{ m.role }}"
    "{% if m.role == 'tool' %} {{ m.name }}{% endif %}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}"
    " {{ c.function.arguments | tojson }}</call>{% endfor %}<|im_end|> {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}"
)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "description": "a city"}}}
TOOLS = [{"type": "function", "function": {"name": "sky", "parameters": SCHEMA}}]
CALL = {"id": "c1", "type": "function", "function": {"name": "sky", "arguments": {"city": "Rome"}}}
MESSAGES = [
    {"role": "system", "content": "Be brief and kind."},
    {"role": "user", "content": [{"type": "text", "text": "Rome?"}], "name": "Ann"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "clear", "tool_call_id": "c1", "name": "sky"},
    {
        "role": "assistant",
        "content": "A clear sky.",
        "reasoning_content": "I was told.",
        "weight": 0,
    },
    {"role": "user", "content": "And Oslo?"},
    {"role": "assistant", "content": "Clouds."},
]
FROM = [
    {"from": "human", "value": "Rome?"},
    {"from": "function_call", "value": '{"name": "sky", "arguments": {"city": "Rome"}}'},
    {"from": "observation", "value": "clear"},
    {"from": "gpt", "value": "A clear sky."},
]
PAIR = {"chosen": "A fig.", "rejected": "A car."}
CHAT = [{"role": "user", "content": "A fruit?"}, {"role": "assistant", "content": "A fig."}]
MORE = {"id": 7, "score": 0.5, "source": "web"}
ROWS = {  # stage, entry, row
    "alpaca": (
        "sft",
        {"formatting": "alpaca"},
        {
            **{"instruction": "Add.", "input": "1 2", "output": "3", "system": "Be terse."},
            **{"history": [["a?", "b"]], "reasoning_content": "One and two.", "tools": TOOLS},
            "chat_template_kwargs": {"unknown": 1},
        },
    ),
    "alpaca, recognized": ("sft", {}, {"question": "A?", "context": "b", "answer": "c", **MORE}),
    "alpaca, pairs": (
        "dpo",
        {"ranking": True},
        {"instruction": "A?", "input": "b", **PAIR, **MORE},
    ),
    "openai": ("sft", {}, {"messages": MESSAGES, "tools": TOOLS, **MORE}),
    "openai, as text": (
        "sft",
        {},
        {
            "messages": json.dumps(MESSAGES[1:]),
            "tools": json.dumps(TOOLS),
            "system": "Be brief and kind.",
        },
    ),
    "openai, pairs": (
        "dpo",
        {},
        {"messages": MESSAGES[:2], "chosen": [CHAT[1]], "rejected": "No."},
    ),
    "openai, marked": ("kto", {}, {"messages": CHAT, "label": 1, "kto_tag": None}),
    "sharegpt": (
        "sft",
        {},
        {"conversations": FROM, "system": "Be terse.", "tools": json.dumps(TOOLS)},
    ),
    "trl": ("sft", {}, {"prompt": "A?", "completion": "b", "system": "Be terse.", **MORE}),
    "trl, turns": (
        "sft",
        {"formatting": "trl"},
        {"prompt": MESSAGES[:2], "completion": MESSAGES[2:]},
    ),
    "trl, pairs": ("dpo", {}, {"prompt": "A?", **PAIR, "margin": 1.0, **MORE}),
    "trl, rewards": ("rm", {}, {"prompt": "A?", **PAIR, "margin": 1.0, **MORE}),
    "trl, marked": ("kto", {}, {"prompt": "A?", "completion": "b", "label": True}),
    "pairs beside a conversation": ("sft", {}, {"prompt": "A?", **PAIR, "messages": CHAT}),
    "orca's pairs": ("dpo", {}, {"system": "Be kind.", "question": "A?", **PAIR}),
    "text": ("pt", {}, {"text": "Once upon a time.", **MORE}),
    "ids": (
        "sft",
        {},
        {"input_ids": [1, 5, 6, 7], "labels": [-100, 5, 6, 7], "attention_mask": [1, 1, 1, 0]},
    ),
    "pictures": (
        "sft",
        {},
        {
            "messages": [{"role": "user", "content": "<image>What?"}, CHAT[1]],
            "images": [{"path": "0.png", "width": 84}],
        },
    ),
    "parts": (
        "sft",
        {},
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": "0.png", "detail": "low"}},
                        {"type": "image", "image": "1.png", "id": "x"},
                        {"type": "text", "text": "Which?", "cache_control": {"type": "none"}},
                    ],
                },
                CHAT[1],
            ]
        },
    ),
}


def inside(value, path=()):
    """The paths of all objects in a value, and of the values of their keys."""
    if isinstance(value, dict):
        yield path, None
        for key, each in value.items():
            yield path, key
            yield from inside(each, (*path, key))
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from inside(each, (*path, number))


def at(row, path):
    for step in path:
        row = row[step]
    return row


def other(value):
    """Another value of the same kind; None if there is none that would say something else."""
    if value is None:
        return None
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return 1 - value if value in (0, 1) else value + 1
    if isinstance(value, str):
        return value.replace("e", "zq") if value.lstrip().startswith(("[", "{")) else f"{value}zq"
    if isinstance(value, list | dict) and not value:
        return None
    return None if isinstance(value, dict) else value[:-1]


def variants(row):
    """Rows that differ from ``row`` in one place, each with what is different."""
    for path, key in inside(row):
        changed = copy.deepcopy(row)
        if key is None:
            at(changed, path)["planted"] = "zq"
            yield f"{path}: planted", changed
            continue
        value = at(row, path)[key]
        if (instead := other(value)) is not None:
            at(changed, path)[key] = instead
            yield f"{path}: {key!r} changed", changed
        if key != "type" and value not in ("", None):  # "function" where none is said
            removed = copy.deepcopy(row)
            del at(removed, path)[key]
            yield f"{path}: {key!r} removed", removed


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    dice = np.random.default_rng(0)
    for name, size in {"0.png": (56, 84), "1.png": (112, 84)}.items():
        Image.fromarray(dice.integers(0, 255, (*size, 3), np.uint8)).save(folder / name)
    base = pictures.save_model(folder / "base", "qwen2_vl")
    section = DataSection(datasets=("any",), dataset_dir=folder, cutoff_len=2000)
    recipe = pictures.recipe(folder, base)
    tokenizer = tiny_tokenizers.tokenizer("qwen")
    text = Codec(tokenizer, Template("own", SOURCE, ("<|im_end|>",)), section)
    seeing = open_codec(replace(recipe, data=replace(recipe.data, dataset_dir=folder)), base)
    return folder, text, seeing


def outcomes(folder, stage_name, raw, rows, *, codec, lines=None):
    """What becomes of each row: what is trained of it or why it is not, and what is named."""
    place = folder / "rows.jsonl"
    place.write_text("\n".join(lines or map(json.dumps, rows)) + "\n")
    entry = read_entry("d", {"file_name": "rows.jsonl", **raw}, folder, "d")
    stage = STAGES.own[stage_name]()
    reading = reading_of(stage, codec)
    read = list(read_examples(entry, max_broken_rows=len(rows), reading=reading))
    for row in read:
        if isinstance(row, BrokenRow):
            yield row.reason, ()
            continue
        try:
            (encoded,) = stage.encode([row], codec)
        except DataError as error:  # which stops the run
            yield str(error), ()
            continue
        is_dropped = isinstance(encoded, Dropped)
        items = [
            {k: bytes(v) if isinstance(v, bytes) else list(v) for k, v in item.items()}
            for item in items_of(encoded)
        ]
        yield (encoded.reason if is_dropped else items), row.unread


def passed_over(folder, stage_name, raw, row, *, codec):
    """The places of a row where another value changes nothing, and that are not named."""
    places, rows = zip(("as it is", row), *variants(row), strict=False)
    first, *rest = outcomes(folder, stage_name, raw, rows, codec=codec)
    for place, outcome in zip(places[1:], rest, strict=True):
        path, _, what = place.rpartition(": ")
        names = {what.split()[0].strip("'"), *re.findall(r"'(\w+)'", path)}
        named = {
            part for each in (*first[1], *outcome[1]) for part in re.split(" of (?:a )?", each)
        }
        if outcome[0] == first[0] and not names & named:
            yield place


@pytest.mark.parametrize("name", ROWS)
def test_what_is_changed_in_a_row_changes_what_is_trained_or_is_named(name, folder):
    place, text, seeing = folder
    stage, raw, row = ROWS[name]
    codec = seeing if name in ("pictures", "parts") else text
    first, *_ = outcomes(place, stage, raw, [row], codec=codec)
    assert isinstance(first[0], list), first
    assert list(passed_over(place, stage, raw, row, codec=codec)) == []


class Forgetful(Alpaca):
    """A format that passes over a column that it has."""

    def read(self, row):
        row = copy.copy(row)
        row.pop("system", None)
        return super().read(row)


def test_a_format_that_forgets_a_column_is_found(folder, monkeypatch):
    place, text, _ = folder
    monkeypatch.setitem(FORMATS, "alpaca", Forgetful)
    found = passed_over(place, *ROWS["alpaca"], codec=text)
    assert list(found) == ["(): 'system' changed", "(): 'system' removed"]


def test_a_template_that_forgets_a_key_is_found(folder):
    place, text, _ = folder
    source = SOURCE.replace("{{ m.name }}", "{{ m.name[:0] }}")
    forgetful = Codec(text.tokenizer, Template("own", source, ("<|im_end|>",)), text.section)
    rows = [ROWS["openai"][2]]
    ((_, unread),) = outcomes(place, "sft", {}, rows, codec=forgetful)
    assert "name of a turn" in unread and "tool_call_id of a turn" in unread
    forgetful.reads = lambda key, of: True  # as if nothing were compared
    found = {*passed_over(place, "sft", {}, rows[0], codec=forgetful)}
    assert "('messages', 3): 'name' changed" in found


def test_a_message_that_the_template_leaves_out_drops_its_row(folder):
    place, text, _ = folder
    late = {"role": "system", "content": "Answer in French."}
    for where in range(1, 5):
        turns = [*MESSAGES[:5][:where], late, *MESSAGES[where:]]
        ((reason, _),) = outcomes(place, "sft", {}, [{"messages": turns}], codec=text)
        assert "does not write a message of the system" in reason
        with pytest.raises(TemplateError, match="a message of the system"):
            text.encode_prompt([Message(m["role"], str(m["content"])) for m in turns])
    chatml = Codec(text.tokenizer, load_template("chatml", text.tokenizer), text.section)
    ((items, _),) = outcomes(place, "sft", {}, [{"messages": turns}], codec=chatml)
    assert isinstance(items, list)


@pytest.mark.parametrize("path", [(), ("messages", 1), ("tools", 0, "function"), ("messages", 2)])
@pytest.mark.parametrize("text", [False, True])
def test_a_key_that_stands_twice_is_refused(path, text, folder):
    """Wherever the object is, also in a text of JSON."""
    place, codec, _ = folder
    row = copy.deepcopy({k: ROWS["openai"][2][k] for k in ("messages", "tools")})
    at(row, path)["twice"] = 1
    line = json.dumps(row).replace('"twice": 1', '"twice": 1, "twice": 2')
    if text and path:
        parts = (
            json.dumps(json.dumps(row[k]).replace('"twice": 1', '"twice": 1, "twice": 2'))
            for k in row
        )
        line = "{" + ", ".join(f'"{k}": {part}' for k, part in zip(row, parts, strict=True)) + "}"
    ((reason, _),) = outcomes(
        place, "sft", {"formatting": "openai"}, [row], codec=codec, lines=[line]
    )
    assert "'twice' occurs twice" in reason


def table(name, names, values):
    arrays = [pa.array([value]) for value in values]
    batch = pa.record_batch(arrays, names=names)
    if name == "rows.parquet":
        pq.write_table(pa.Table.from_batches([batch]), name)
        return
    with pa.OSFile(name, "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
        writer.write(batch)


@pytest.mark.parametrize(
    "name", ["rows.csv", "rows.tsv", "rows.json", "rows.parquet", "rows.arrow"]
)
def test_a_column_that_stands_twice_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names, values = ["prompt", "prompt", "response"], ["a", "b", "c"]
    if name in ("rows.csv", "rows.tsv"):
        separator = "," if name == "rows.csv" else "\t"
        Path(name).write_text(f"{separator.join(names)}\n{separator.join(values)}\n")
    elif name == "rows.json":
        Path(name).write_text('[{"prompt": "a", "prompt": "b", "response": "c"}]')
    else:
        table(name, names, values)
    with pytest.raises(DataError, match="'prompt' occurs twice"):
        list(read_examples(read_entry("d", {"file_name": name}, tmp_path, "d")))


def test_a_member_of_a_structure_that_stands_twice_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    twice = pa.StructArray.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["k", "k"])
    batch = pa.record_batch(
        [pa.array(["q"]), pa.array(["a"]), twice], names=["prompt", "response", "x"]
    )
    with pa.OSFile("rows.arrow", "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
        writer.write(batch)
    with pytest.raises(DataError, match="'k' occurs twice"):
        list(read_examples(read_entry("d", {"file_name": "rows.arrow"}, tmp_path, "d")))


ASKED = [{"role": "user", "content": "<image>What?"}, CHAT[1]]
POINTING = {  # row, what is said
    "null": ({"messages": ASKED, "images": None}, "<image>"),
    "blank": ({"messages": ASKED, "images": ""}, "<image>"),
    "absent": ({"messages": ASKED}, "<image>"),
    "another column": ({"messages": ASKED, "imgs": ["0.png"]}, "<image>.*imgs"),
    "a video": (
        {"messages": [{"role": "user", "content": "<video>What?"}, CHAT[1]], "my_video": "1.mp4"},
        "<video>",
    ),
    "a number": (
        {"messages": [{"role": "user", "content": "<image_1> What?"}, CHAT[1]]},
        "<image_1>",
    ),
    "an answer": ({"messages": [CHAT[0], {"role": "assistant", "content": "<bbox>"}]}, "<bbox>"),
    "a chosen one": ({"prompt": "A?", "chosen": "<bbox>", "rejected": "b"}, "<bbox>"),
    "beside a part": (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "image": "0.png"},
                        {"type": "text", "text": "<image>"},
                    ],
                },
                CHAT[1],
            ]
        },
        "<image>",
    ),
}


@pytest.mark.parametrize("name", POINTING)
def test_a_mark_that_stands_for_nothing_is_an_error_where_pictures_are_read(name, folder):
    place, text, seeing = folder
    row, said = POINTING[name]
    stage = "dpo" if "chosen" in row else "sft"
    ((reason, _),) = outcomes(place, stage, {}, [row], codec=seeing)
    assert isinstance(reason, str) and re.search(said, reason)
    off = {"columns": dict.fromkeys(["images", "videos", "objects"])}
    if name != "beside a part":
        ((items, unread),) = outcomes(place, stage, off, [row], codec=seeing)
        assert isinstance(items, list) and not any(key.startswith("<") for key in unread)
        ((items, unread),) = outcomes(place, stage, {}, [row], codec=text)  # reads text alone
        assert isinstance(items, list) and f"{said.partition('.')[0]} in a text" in unread


@pytest.mark.parametrize("said", ["<bbox>1, 2</bbox>", "<image>a.png</image>", "a <video> tag"])
def test_a_tag_is_no_mark(said, folder):
    row = {"messages": [CHAT[0], {"role": "assistant", "content": said}]}
    ((items, _),) = outcomes(folder[0], "sft", {}, [row], codec=folder[2])
    assert isinstance(items, list)


@pytest.mark.parametrize("objects", [{"ref": ["a"], "bbox": [[1, 2, 3, 4]]}, '{"bbox": [[1, 2]]}'])
def test_boxes_that_marks_stand_for_are_an_error_in_every_model(objects, folder):
    place, text, _ = folder
    row = {"messages": CHAT, "objects": objects}
    with pytest.raises(DataError, match=r'row 0 has objects.*"columns": \{"objects": null\}'):
        list(outcomes(place, "sft", {}, [row], codec=text))
    ((items, unread),) = outcomes(place, "sft", {"columns": {"objects": None}}, [row], codec=text)
    assert isinstance(items, list) and unread == ()
    ((_, unread),) = outcomes(place, "sft", {}, [{**row, "objects": ["cup"]}], codec=text)
    assert unread == ("objects",)


@pytest.mark.parametrize("key", ["min_pixels", "max_pixels", "resized_height", "crop", "fps"])
@pytest.mark.parametrize("place", ["part", "picture", "column"])
def test_sizes_of_a_picture_are_an_error(key, place, folder):
    picture, part = {"url": "0.png"}, {"type": "image_url", "image_url": {"url": "0.png"}}
    row = {"messages": [{"role": "user", "content": [part]}, CHAT[1]]}
    if place == "column":
        row = {"messages": [CHAT[0], CHAT[1]], "images": [picture]}
    {"part": part, "picture": part["image_url"], "column": picture}[place][key] = 56
    ((reason, _),) = outcomes(folder[0], "sft", {}, [row], codec=folder[2])
    assert isinstance(reason, str) and f"'{key}' of a picture is not read" in reason


JSON_TEXTS = [
    [{"name": "Rex"}],
    [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}],
    [{"role": "assistant", "content": "Hello"}],
    [{"role": "assistant", "content": "Hello"}, {"name": "Rex"}],
    [{"role": "king", "content": "Hello"}],
]


@pytest.mark.parametrize("value", JSON_TEXTS)
def test_a_response_in_json_is_text(value, folder):
    text = json.dumps(value)
    (example,) = examples(folder[0], {"prompt": "Write it as JSON.", "completion": text})
    assert [m.content for m in example.messages] == ["Write it as JSON.", text]
    (example,) = examples(folder[0], {"prompt": "A?", "chosen": text, "rejected": "b"})
    assert (example.chosen.content, example.rejected.content) == (text, "b")


def test_turns_of_a_csv_file_are_turns(folder):
    turns = [{"role": "user", "content": "A?"}], [{"role": "assistant", "content": "b"}]
    prompt, answer = map(json.dumps, turns)
    (example,) = examples(folder[0], {"prompt": prompt, "completion": answer})
    assert [m.content for m in example.messages] == ["A?", "b"]
    whole = json.dumps([*turns[0], *turns[1]])
    other = json.dumps([*turns[0], {"role": "assistant", "content": "c"}])
    for more in ({}, {"prompt": "A?"}, {"prompt": prompt}):
        (example,) = examples(folder[0], {**more, "chosen": whole, "rejected": other})
        assert (example.messages[0].content, example.chosen.content) == ("A?", "b")


def examples(place, *rows, **raw):
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return list(read_examples(read_entry("d", {"file_name": "rows.jsonl", **raw}, place, "d")))


UNUSUAL = {  # rows that need no entry, and what is read of them
    "a picture": ({"image": "0.png", "conversations": FROM[:1] + FROM[3:]}, "image"),
    "roles": (
        {"conversations": [{"from": "user", "value": "A?"}, {"from": "assistant", "value": "b"}]},
        "A?",
    ),
    "pictures in csv": (
        {"instruction": "<image>A?", "output": "b", "images": '["0.png"]'},
        "0.png",
    ),
    "orca": ({"system": "Be kind.", "question": "A?", "chosen": "b", "rejected": "c"}, "Be kind."),
    "pairs of turns": ({"instruction": "A?", "chosen": [CHAT[1]], "rejected": [CHAT[1]]}, "A?"),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_rows_as_people_have_them_need_no_entry(name, folder):
    row, part = UNUSUAL[name]
    (example,) = examples(folder[0], row)
    shown = [m.content for m in example.messages] + [s for m in example.messages for s in m.media]
    assert part in shown or (part == "image" and shown[-1] == "0.png")
    assert example.unread == ()


@pytest.mark.parametrize("off", ["videos", "tools", "system"])
def test_an_entry_that_switches_a_column_off_leaves_the_rest_to_the_rows(off, folder):
    value = TOOLS if off == "tools" else "x"
    (example,) = examples(folder[0], {"messages": CHAT, off: value}, columns={off: None})
    assert (len(example.messages), example.tools, example.unread) == (2, (), ())


def test_of_pairs_beside_a_conversation_each_stage_reads_its_own(folder):
    place, text, _ = folder
    own = [CHAT[0], {"role": "assistant", "content": "Another one."}]
    row = {
        "prompt": "A fruit?",
        "chosen": CHAT,
        "rejected": [CHAT[0], {**CHAT[1], "content": "A car."}],
        "messages": own,
    }
    ((items, unread),) = outcomes(place, "sft", {}, [row], codec=text)
    assert "Another one." in text.tokenizer.decode(items[0]["input_ids"])
    assert unread == ("prompt", "chosen", "rejected")
    ((items, unread),) = outcomes(place, "dpo", {}, [row], codec=text)
    assert "Another one." not in text.tokenizer.decode(items[0]["input_ids"])
    assert unread == ("messages",)


def test_a_prompt_that_complete_conversations_do_not_repeat_is_named(folder):
    row = {"prompt": "A fruit?", "chosen": CHAT, "rejected": [CHAT[0], {**CHAT[1], "content": "b"}]}
    assert examples(folder[0], row)[0].unread == ()
    assert examples(folder[0], {**row, "prompt": "A car?"})[0].unread == ("prompt of the row",)


CALLING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} WRITE]{% endfor %}<|im_end|> "
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}"
)
WRITTEN = {  # how a template writes arguments, whether it takes them as text
    "{{ 'json ' + c.function.arguments }}": True,
    "{{ c.function.arguments }}": True,
    "{{ c['function']['arguments'] | trim }}": True,
    "{{ c.function.arguments | tojson }}": False,
    "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}": False,
}


@pytest.mark.parametrize("write", WRITTEN)
@pytest.mark.parametrize("arguments", ['{"city":"Rome", "ok": true}', {"city": "Rome", "ok": True}])
def test_arguments_are_written_as_the_template_takes_them(write, arguments, folder):
    place, text, _ = folder
    codec = Codec(
        text.tokenizer,
        Template("own", CALLING.replace("WRITE", write), ("<|im_end|>",)),
        text.section,
    )
    call = {"type": "function", "function": {"name": "sky", "arguments": arguments}}
    turns = [CHAT[0], {"role": "assistant", "content": "", "tool_calls": [call]}]
    ((items, _),) = outcomes(place, "sft", {}, [{"messages": turns}], codec=codec)
    shown = codec.tokenizer.decode(items[0]["input_ids"])
    as_text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    call["function"]["arguments"] = as_text if WRITTEN[write] else json.loads(as_text)
    source = CALLING.replace("WRITE", write)
    expected = codec.tokenizer.apply_chat_template(turns, chat_template=source, tokenize=False)
    assert shown.strip() == expected.strip()
    assert "True" not in shown or "=" in shown


@pytest.mark.parametrize(
    ("row", "advice"),
    [
        ({"input": "a", "output": "b"}, r"columns: \{prompt: input, response: output\}"),
        (
            {"input": {"messages": []}, "preferred_output": [CHAT[1]]},
            "one of these forms: messages",
        ),
        ({"a": "text", "b": [1]}, r"columns: \{prompt: a\}"),
    ],
)
def test_advice_for_an_entry_can_be_followed(row, advice, folder):
    with pytest.raises(DataError, match=advice):
        examples(folder[0], row)
