"""Every export, opened by itself as its reader does, asks a model what training asked it."""

import json
import os
import re
from itertools import product

import pytest

import pictures
import surefoot
from each import some
from folders import CHATML, edit_json, save_recipe
from surefoot.checkpoint.converting import targets
from surefoot.checkpoint.converting.targets import HuggingFaceModel
from surefoot.plugins.gguf.targets import GGUF
from surefoot.plugins.quantize.target import QuantizedFolder
from surefoot.use import export
from surefoot.use.exporting.conversion import convert
from surefoot.use.exporting.verification import compare_alone

SYSTEM = 'Answer as a clerk of the "harbour".\nSay """yes""" often.'
EXPORTS = {
    "huggingface": HuggingFaceModel(),
    "float16": HuggingFaceModel(dtype="float16"),
    "gguf": GGUF(quantize="f32"),
    "compressed-tensors": QuantizedFolder(quantize="fp8"),
}
TASKS = {
    "full": {"method": "full"},
    "lora": {"method": {"lora": {"rank": 2}}},
    "system text": {"method": {"lora": {"rank": 2}}, "data": {"default_system": SYSTEM}},
    "system text, full": {"method": "full", "data": {"default_system": SYSTEM}},
    "tags": {
        "method": {"lora": {"rank": 2, "modules_to_save": ["embed_tokens", "lm_head"]}},
        "model": {"new_special_tokens": ["<answer>", "</answer>"]},
    },
    "template": {"method": "full", "data": {"template": "chatml"}},
    "end token": {"method": "full", "model": {"eos_token": "<|im_end|>"}},
    "plain text": {"method": "full", "stage": "pt"},
    "preferences": {"method": "full", "stage": "dpo"},
}
WIDE = {"shortest_edge": 784, "longest_edge": 50176}  # pixels of a picture
FEW = [(e, "system text") for e in ("huggingface", "gguf")]
FEW += [("huggingface", task) for task in ("tags", "plain text")]
PAIRS = [{"prompt": f"{n}?", "chosen": "yes, of course", "rejected": "never"} for n in range(12)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Trains each task once."""
    made = {}

    def run(task):
        if task not in made:
            folder = tmp_path_factory.mktemp("run")
            settings = dict(TASKS[task])
            short = {"max_steps": 1, "eval_steps": None, "output_dir": str(folder / "run")}
            if settings.get("stage") == "dpo":
                (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, PAIRS)))
                data = {"datasets": [str(folder / "pairs.jsonl")], "val_size": 0}
                settings["data"] = {**data, **settings.get("data", {})}
            path = save_recipe(folder, train=short, checkpoint={"save_steps": 1}, **settings)
            surefoot.train(path)
            made[task] = folder / "run"
        return made[task]

    return run


def exported(run, name, folder):
    suffix = EXPORTS[name].suffix
    return export(run, folder / f"out{suffix}", EXPORTS[name])


@pytest.mark.parametrize(("name", "task"), some([*product(EXPORTS, TASKS)], FEW))
def test_what_is_exported_reads_as_the_run(runs, name, task, tmp_path):
    result = compare_alone(exported(runs(task), name, tmp_path))
    assert result.differences == []
    assert result.num_prompts >= 3 + 18 * (task not in ("plain text", "preferences"))


def test_the_walk_is_as_long_as_its_tables():
    assert len([*product(EXPORTS, TASKS)]) == 36


def without_system(out):
    (out / "chat_template.jinja").write_text(CHATML)


def with_another_end(out):
    edit_json(out / "generation_config.json", eos_token_id=256)


def with_other_tokens(out):
    edit_json(out / "tokenizer.json", normalizer={"type": "Lowercase"})


def without_tokenizer(out):
    (out / "tokenizer.json").unlink()
    (out / "tokenizer_config.json").unlink()


def with_a_first_token(out):
    template = (out / "chat_template.jinja").read_text()
    (out / "chat_template.jinja").write_text("<|endoftext|>" + template)


PLANTED = {
    "its prompt is": without_system,
    r"its prompt is '<\|endoftext\|>": with_a_first_token,
    "does not end responses with": with_another_end,
    r"its prompt is '<.im_start.>system\\nanswer as": with_other_tokens,
    "opens no tokenizer": without_tokenizer,
}


@pytest.mark.parametrize("words", PLANTED)
def test_a_planted_fault_is_found(runs, words, tmp_path):
    out = exported(runs("system text"), "huggingface", tmp_path)
    PLANTED[words](out)
    result = compare_alone(out)
    assert any(re.search(words, line) for line in result.differences), result.differences


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (with_a_first_token, r"its prompt is '<\|endoftext\|>"),
        (with_another_end, "does not end responses with"),
        (with_other_tokens, "its prompt is"),
        (without_tokenizer, "opens no tokenizer"),
    ],
)
def test_a_planted_fault_of_a_conversion_is_said(runs, fault, words, tmp_path, monkeypatch, caplog):
    write = targets.write_small
    monkeypatch.setattr(targets, "write_small", lambda *a: (write(*a), fault(a[0])))
    (folder,) = runs("full").glob("checkpoint-*")
    convert(folder, tmp_path / "out", HuggingFaceModel())
    assert re.search(f"out by itself: .*{words}", caplog.text)


@pytest.fixture(scope="module", params=some(["qwen2_vl", "gemma3"], ["qwen2_vl"]))
def seen(request, tmp_path_factory):
    """A run with pictures, larger ones among them, and its export."""
    folder = tmp_path_factory.mktemp(request.param)
    base = pictures.save_model(folder / "base", request.param)
    if request.param == "qwen2_vl":
        edit_json(base / "preprocessor_config.json", size=WIDE)
    rows = pictures.rows(folder)
    for number, row in enumerate(rows):
        for name in row["images"]:
            pictures.picture(folder / name, (300 + 37 * number, 170), seed=number)
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    method = {"lora": {"rank": 2}}
    train = {"max_steps": 1, "micro_batch_size": 4}
    made = pictures.recipe(folder, base, media={"max_pixels": 12544}, method=method, train=train)
    surefoot.train(folder / f"recipe-{os.getpid()}.yaml")
    return request.param, export(made.train.output_dir, folder / "out")


def test_pictures_have_the_size_of_training(seen):
    kind, out = seen
    result = compare_alone(out)
    assert result.num_pictures >= 5
    if kind == "gemma3":  # its pictures have one size, and its settings no limit
        (line,) = result.differences
        assert "more than 12,544 pixels smaller" in line
        return
    assert result.differences == []
    edit_json(out / "preprocessor_config.json", size=WIDE)
    (line,) = compare_alone(out).differences
    assert "tokens for a picture of" in line


def test_a_text_that_ends_in_the_end_token_is_read_as_it_is(runs, tmp_path):
    """The planted fault of GGUF: a last token behind each prompt."""
    out = exported(runs("full"), "gguf", tmp_path)
    data = out.read_bytes()
    key = b"tokenizer.ggml.add_eos_token"
    at = data.index(key) + len(key) + 4  # its type comes first
    assert data[at : at + 1] == b"\0"
    out.write_bytes(data[:at] + b"\1" + data[at + 1 :])
    assert "its prompt is" in compare_alone(out).differences[0]
