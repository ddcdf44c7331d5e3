"""The bundled demo: its data can be made again, hides what is held out; its recipes are valid.

And the plain torch loop, which goes on by itself when it was killed.
"""

import importlib
import json
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from ruamel.yaml import YAML
from torch.distributed.run import get_args_parser
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
)

from commands import ok
from project import checkpoints, in_child
from surefoot.recipe.recipe import load

EXAMPLES = Path(__file__).parent.parent / "examples"
DATA = EXAMPLES / "data"


def record(row):
    """The fields of a row's answer."""
    return dict(field.split(": ", 1) for field in row["output"].split("; "))


def rows(name):
    with (DATA / name).open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def make_data():
    sys.path.insert(0, str(EXAMPLES))
    try:
        return importlib.import_module("make_data")
    finally:
        sys.path.remove(str(EXAMPLES))


@pytest.fixture(scope="module")
def village(make_data):
    return sys.modules["village"]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(EXAMPLES / "base-model")


def test_the_bundled_rows_are_those_the_generator_writes(make_data):
    train, held_out = rows("orders_train.jsonl"), rows("orders_held_out.jsonl")
    assert train == make_data.notes(len(train), seed=1, reserved=False)
    assert held_out == make_data.notes(len(held_out), seed=1, reserved=True)
    assert len(train) >= 2000
    assert len(held_out) >= 200


def test_no_held_out_note_name_or_kind_of_goods_is_trained_on(make_data):
    train, held_out = rows("orders_train.jsonl"), rows("orders_held_out.jsonl")
    assert not {row["input"] for row in train} & {row["input"] for row in held_out}
    for key in ("name", "item"):
        seen = {record(row)[key] for row in train}
        assert not seen & {record(row)[key] for row in held_out}
    prose = [text["text"] for text in make_data.corpus(2000, seed=1)]
    make_data.check_nothing_leaks([*prose, *(row["input"] for row in train)], held_out)


def test_a_leaked_name_is_noticed(make_data):
    held_out = rows("orders_held_out.jsonl")
    name = record(held_out[0])["name"]
    with pytest.raises(SystemExit, match=name.split()[0].lower()):
        make_data.check_nothing_leaks([f"Yesterday {name} came by."], held_out)


def test_held_out_words_are_all_known_from_training():
    def words(name):
        answers = [record(row) for row in rows(name)]
        return {w for a in answers for key in ("name", "item") for w in a[key].split()}

    assert words("orders_held_out.jsonl") <= words("orders_train.jsonl")


def test_an_answer_says_what_its_note_says(make_data, village):
    rng = random.Random(0)
    for _ in range(200):
        row = make_data.note(village.draw(rng, reserved=False), rng)
        answer = record(row)
        assert answer["name"] in row["input"]
        assert answer["item"].split()[0] in row["input"].lower()
        assert answer["city"] == "none" or answer["city"] in row["input"]
        assert 1 <= int(answer["quantity"]) <= 20
        assert (answer["date"] == "none") == (
            not any(month in row["input"] for month in village.MONTHS)
        )


def test_the_corpus_has_no_record_and_no_instruction(make_data):
    for text in make_data.corpus(2000, seed=1):
        assert "name: " not in text["text"]
        assert make_data.INSTRUCTION not in text["text"]


def test_the_bundled_pairs_are_those_the_generator_writes(make_data):
    train, held_out = rows("pairs_train.jsonl"), rows("pairs_held_out.jsonl")
    assert train == make_data.preferences(len(train), seed=1, reserved=False)
    assert held_out == make_data.preferences(len(held_out), seed=1, reserved=True)
    make_data.check_nothing_leaks([row["input"] for row in train], held_out)
    seen = {row["input"] for row in (*rows("orders_train.jsonl"), *train)}
    assert not seen & {row["input"] for row in held_out}


def test_the_bundled_marked_rows_are_one_answer_of_each_pair(make_data):
    for name in ("train", "held_out"):
        pairs, marked = rows(f"pairs_{name}.jsonl"), rows(f"marked_{name}.jsonl")
        assert marked == make_data.marked(pairs)
        assert sum(row["is_good"] for row in marked) == len(marked) // 2


def test_the_better_of_two_records_leaves_out_what_nobody_knows():
    for row in (*rows("pairs_train.jsonl"), *rows("pairs_held_out.jsonl")):
        worse = record({"output": row["rejected"]})
        better = record({"output": row["chosen"]})
        assert better == {key: value for key, value in worse.items() if value != "none"} != worse


@pytest.mark.parametrize("recipe", sorted(path.name for path in EXAMPLES.glob("*.yaml")))
def test_the_recipes_are_valid(recipe):
    assert load(EXAMPLES / recipe).data.dataset_dir == DATA


def test_the_bundle_is_small():
    files = [f for folder in ("base-model", "data") for f in (EXAMPLES / folder).iterdir()]
    assert sum(f.stat().st_size for f in files if f.name != "corpus.jsonl") < 8_000_000


def test_the_base_model_opens_and_knows_every_token(tokenizer):
    model = AutoModelForCausalLM.from_pretrained(EXAMPLES / "base-model")
    assert 1_000_000 <= model.num_parameters() <= 3_000_000
    assert model.get_input_embeddings().num_embeddings >= len(tokenizer)
    assert model.config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")


def test_the_tokenizer_spells_any_text_and_has_every_village_word_whole(tokenizer, village):
    texts = ["Grüße, 世界! \n\t 1234 {}", *(row["input"] for row in rows("orders_held_out.jsonl"))]
    for text in texts:
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    for word in (*village.FIRST, *village.LAST, *village.GOODS, *village.GOODS.values()):
        assert len(tokenizer(f" {word}").input_ids) == 1


def test_the_chat_template_marks_the_answer(tokenizer):
    turns = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Good day."}]
    encoded = tokenizer.apply_chat_template(
        turns, return_assistant_tokens_mask=True, return_dict=True
    )
    learned = [
        i for i, m in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if m
    ]
    assert tokenizer.decode(learned) == "Good day.<|im_end|>"
    prompt = tokenizer.apply_chat_template(turns[:1], add_generation_prompt=True)["input_ids"]
    assert encoded["input_ids"][: len(prompt)] == prompt


def test_the_plain_torch_loop_goes_on_when_it_was_killed(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(EXAMPLES)
    loop = importlib.import_module("plain_torch_loop")
    whole = loop.main(tmp_path / "whole", steps=500)
    for count in (1, 2):  # checkpoints there when it is killed
        killed = in_child(
            lambda: loop.main(tmp_path / "run", steps=500),
            kill_when=lambda: len(checkpoints(tmp_path / "run")) >= count,  # noqa: B023
        )
        assert killed == -signal.SIGKILL
    resumed = loop.main(tmp_path / "run", steps=500)
    assert "resuming from" in capsys.readouterr().out
    for one, other in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)


def test_the_plain_torch_loop_is_short():
    assert len((EXAMPLES / "plain_torch_loop.py").read_text().splitlines()) < 60


CLUSTER = EXAMPLES / "cluster"


@pytest.mark.parametrize("name", ["kubernetes.yaml", "skypilot.yaml"])
def test_the_files_for_clusters_are_yaml_that_starts_the_command(name):
    text = (CLUSTER / name).read_text()
    documents = [*YAML(typ="safe").load_all(text)]
    assert all(isinstance(document, dict) for document in documents)
    assert "surefoot" in str(documents)
    assert "train" in str(documents)


def test_no_file_for_clusters_mounts_a_bucket_under_a_run():
    for path in CLUSTER.iterdir():
        lines = [line.partition("#")[0] for line in path.read_text().splitlines()]
        assert not any("MOUNT" in line for line in lines), path.name


def test_torchrun_leaves_time_for_a_save_wherever_it_is_shown():
    """Its own 30 seconds are fewer than the save of a large model takes."""
    pages = [*CLUSTER.iterdir(), *(EXAMPLES.parent / "docs").rglob("*.md")]
    texts = [path.read_text().replace("\\\n", " ") for path in pages]
    lines = [line for text in texts for line in text.splitlines() if "surefoot" in line]
    shown = [line for line in lines if re.search(r"torchrun,? -", line)]
    assert len(shown) >= 3
    for line in shown:
        words = line[line.index("torchrun") :].replace(",", " ").rstrip("]").split()[1:]
        given = get_args_parser().parse_args(words)
        assert given.shutdown_timeout == 240, line
    _, runtime, _ = YAML(typ="safe").load_all((CLUSTER / "kubernetes.yaml").read_text())
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    pod = node["template"]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > 240


def test_the_batch_script_is_one_that_bash_reads():
    script = CLUSTER / "slurm.sbatch"
    subprocess.run(["bash", "-n", script], check=True)
    assert "srun --kill-on-bad-exit=1 surefoot train" in script.read_text()


def executed(name, folder, monkeypatch):
    """What the cells of a notebook leave, run in a folder like the one of the examples."""
    cells = json.loads((EXAMPLES / name).read_text())["cells"]
    assert all(not cell.get("outputs") for cell in cells), "saved without outputs"
    (folder / "examples").mkdir()
    (folder / "examples/base-model").symlink_to(EXAMPLES / "base-model")
    monkeypatch.chdir(folder / "examples")
    space = {}
    for number, cell in enumerate(cells):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), space)
    return space


def test_the_notebook_runs_from_top_to_bottom(tmp_path, monkeypatch):
    run = executed("from_python.ipynb", tmp_path, monkeypatch)["run"]
    assert run.global_step == 20
    assert run.output_dir.resolve() == tmp_path / "runs/from-python"
    assert 0 <= run.log_history[-1]["eval_surely"] <= 1


def test_the_notebook_that_bends_the_trainer_runs_from_top_to_bottom(tmp_path, monkeypatch, capsys):
    space = executed("like_the_trainer.ipynb", tmp_path, monkeypatch)
    run, watch, history = space["run"], space["watch"], space["run"].log_history
    assert (run.global_step, watch.a, len(set(watch.norms))) == (20, 20, 20)
    logged = {record["step"]: record["learning_rate"] for record in history if "loss" in record}
    assert logged == {step: watch.rates[step - 1] for step in (5, 10, 15, 20)}
    evaluated = {record["step"]: record for record in history if "eval_loss" in record}
    assert [*evaluated] == [5, 7, 10, 15, 20]  # 7 by the control that was returned
    assert {step: seen[1] for step, seen in space["on_train_data"].seen.items()} == {
        step: record["eval_small_loss"] for step, record in evaluated.items()
    }
    learning_rate, compute_loss = space["refused"]
    assert "set optim.learning_rate in the recipe" in learning_rate
    assert "StageParts(loss=...)" in compute_loss
    assert "'eval_large_loss'" in capsys.readouterr().out  # by transformers' printer
    assert space["after"]["eval_loss"] == run.best_metric < space["before"]["eval_loss"]
    for name, value in space["model"].state_dict().items():
        assert torch.equal(value, space["again"].state_dict()[name])
    assert (space["longer"].state.global_step, space["longer"].args.a) == (25, 20)


@pytest.fixture
def pictures(tmp_path, monkeypatch, num_train):
    """The demo of pictures in a folder of its own, with this many figures to train on."""
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(sys, "argv", ["make_pictures", "--out", str(tmp_path / "pictures")])
    sys.argv += ["--train", str(num_train), "--held-out", "200"]
    importlib.import_module("make_pictures").main()
    recipe = (EXAMPLES / "pictures.yaml").read_text()
    (tmp_path / "pictures.yaml").write_text(recipe)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def named(folder, checkpoint):
    """How many held-out figures transformers names right from a checkpoint: with their own picture,
    and with that of another row."""
    processor = AutoProcessor.from_pretrained(checkpoint)
    model = AutoModelForImageTextToText.from_pretrained(checkpoint)
    lines = (folder / "pictures" / "figures_held_out.jsonl").read_text().splitlines()
    drawn = [json.loads(line) for line in lines]
    answers = [row["messages"][1]["content"] for row in drawn]
    images = [Image.open(folder / "pictures" / row["images"][0]) for row in drawn]
    question = [{"type": "image"}, {"type": "text", "text": "What is this?"}]
    text = processor.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True
    )
    shares = []
    for shown in (images, images[1:] + images[:1]):
        batch = processor(
            text=[text] * len(shown),
            images=[[image] for image in shown],
            return_tensors="pt",
            add_special_tokens=False,
        )
        ids = model.generate(**batch, max_new_tokens=8, do_sample=False)
        texts = processor.batch_decode(ids[:, batch["input_ids"].shape[1] :])
        said = [text.partition("<end_of_turn>")[0] for text in texts]
        shares.append(sum(map(str.__eq__, said, answers)) / len(answers))
    return shares


@pytest.mark.parametrize("num_train", [32])
def test_the_demo_of_pictures_trains_on_them(pictures, num_train):
    ok("train", "pictures.yaml", "train.max_steps=2")
    (checkpoint,) = checkpoints(pictures / "runs" / "pictures")
    assert max(named(pictures, checkpoint)) < 0.5  # it opens, and has not learnt it


@pytest.mark.proof
@pytest.mark.parametrize("num_train", [6400])
def test_a_small_model_learns_to_name_figures_from_the_pictures_alone(pictures, num_train):
    ok("train", "pictures.yaml")
    own, swapped = named(pictures, checkpoints(pictures / "runs" / "pictures")[-1])
    assert own >= 0.97
    assert swapped < 0.2  # chance is a sixteenth
