"""The plan command: a screen to read, JSON to compute with, and errors as everywhere."""

import json
import re

import pytest

import commands
import surefoot
from project import Project
from project import tokenizer as project_tokenizer
from surefoot.cli.plan import PARTS, duration
from surefoot.model.chunked_cross_entropy import CHUNK

run, ok, refused = commands.of("plan")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    train = {"global_batch_size": 8}
    return Project(tmp_path_factory.mktemp("p") / "p", data={"val_size": 2}, train=train).recipe


def as_json(*args):
    shown = ok(*args, "--json")
    return json.loads(shown)


def test_the_screen_tells_all_of_it(recipe):
    shown = ok(recipe, "--tokens-per-second", 10, "--device", "cpu")
    out = shown
    assert "12 (4 epochs), each of 4 × 2 examples per rank" in out
    assert "about 22 (from a sample of 24 rows)" in out
    assert "at 10 tokens/s (as given)" in out
    for word in ("weights", "gradients", "optimizer", "activations", "at its peak"):
        assert f"\n{word} " in out
    assert "4 of 4 at a time, the one being written included" in out
    assert "shared memory of a rank" in out
    assert "lengths are those of 24 rows" in out


def test_there_are_never_more_logits_than_a_chunk_of_them(recipe):
    rows = [
        "train.global_batch_size=22",
        "train.micro_batch_size=22",
        "data.train_on_prompt=true",
    ]
    found = as_json(recipe, *rows)
    width = len(project_tokenizer())
    assert found["heaviest_pass"]["trained"] > 1.5 * CHUNK
    assert 0 < found["memory"]["logits"] <= CHUNK * width * 4


def test_json_holds_all_of_it(recipe):
    found = as_json(recipe)
    memory = found["memory"]
    assert memory.keys() == {*PARTS, "peak"}
    assert memory["peak"] == sum(memory.values()) - memory["peak"], "several passes a step"
    process = found["process"]
    assert process["snapshot"] == found["checkpoint"]["shared_memory"] > 0
    assert process["imports"] > 100e6, "torch alone"
    assert process["total"] == memory["peak"] + process["imports"] + process["snapshot"]
    gpu = as_json(recipe, "--device", "gpu")
    assert gpu["process"] == {"imports": 0, "snapshot": 0, "total": gpu["memory"]["peak"]}
    assert found["steps"] == 12
    assert found["checkpoint"]["disk"] == 4 * found["checkpoint"]["total"]
    assert found["seconds"] is None


def test_processes_are_those_of_the_recipe_or_those_asked_for(recipe):
    two = (recipe, "parallel.num_processes=2")
    assert as_json(*two)["processes"]["count"] == 2
    asked = as_json(*two, "--num-processes", 4)["processes"]
    assert (asked["count"], asked["dp_replicate"], asked["dp_shard"]) == (4, 1, 4)
    out = run(recipe, "--num-processes", 4, "--device", "gpu").stdout
    assert "4 = dp_replicate 1 × dp_shard 4, bf16, on GPUs" in out
    assert "buffers" in out


def test_ranks_that_share_rows_have_a_part_of_the_activations_and_what_they_fetch_is_said(recipe):
    two = (recipe, "parallel.num_processes=2", "train.micro_batch_size=4", "--device", "cpu")
    alone, shared = as_json(*two), as_json(*two, "parallel.cp=2")
    part, batch = shared["shared_rows"], shared["heaviest_pass"]
    assert alone["shared_rows"] is None
    assert batch["tokens"] / 2 <= part["tokens"] <= 0.6 * batch["tokens"]
    assert shared["memory"]["activations"] < 0.7 * alone["memory"]["activations"]
    assert part["longest"] < part["tokens"]
    (remark,) = [line for line in shared["remarks"] if "parallel.cp" in line]
    assert "with cp 1 and a smaller train.micro_batch_size" in remark
    few = (
        recipe,
        "parallel.num_processes=2",
        "parallel.cp=2",
        "train.micro_batch_size=1",
        "--device",
        "cpu",
    )
    divided = as_json(*few)["shared_rows"]  # one document, which both ranks need most of
    width = 2 * 2 * 8 * 4  # keys and values of two heads of 8 float32 numbers
    assert divided["fetched"] in {width * (divided["longest"] // 2 + more) for more in (0, 1)}
    out = run(*few).stdout
    assert "dp_shard 2, of which 2 share each row" in out
    assert "of keys and values fetched in a layer" in out
    assert "with cp 1" not in out


def test_of_a_pipeline_it_is_said_what_is_not_known(recipe):
    out = run(recipe, "parallel.pp=2", "parallel.num_processes=2").stdout
    assert " × pp 2" in out
    assert "without activations and logits" in out
    assert "the run is a pipeline (parallel.pp), whose stages are not estimated" in out


def test_a_run_that_takes_more_than_there_is_is_told_so(recipe, monkeypatch):
    import psutil

    class Little:
        total = 1000

    monkeypatch.setattr(psutil, "virtual_memory", Little)
    out = run(recipe, "--device", "cpu").stdout
    assert "more than the available 1 kB" in out
    assert "add --memory 1e-06GB to look for settings that fit" in out


def test_saves_by_the_clock_are_said_not_to_be_counted(recipe):
    changes = ("checkpoint.save_minutes=5", "checkpoint.async_save=false")
    out = run(recipe, *changes).stdout
    assert "save_minutes not counted" in out
    assert "shared memory" not in out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["train.micro_batch_sise=2"], "did you mean micro_batch_size"),
        (["--num-processes", "3"], "is not a multiple of train.micro_batch_size"),
        (["parallel.dp_shard=2", "--num-processes", "4"], "but there are 4 processes"),
        (["--tokens-per-second", "0"], "not in the range"),
        (["model.path=/no/such/model"], "/no/such/model"),
        (["stage.grpo.reward=none.py:reward"], "there is no Python file"),
    ],
)
def test_a_mistake_is_told_without_a_traceback(recipe, args, words):
    assert words in refused(recipe, *args)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0 s"), (59, "59 s"), (61, "1 min 1 s"), (3600, "1 h 0 min"), (200_000, "2 d 7 h")],
)
def test_a_time_is_told_in_two_units(seconds, text):
    assert duration(seconds) == text


def test_settings_are_chosen_for_a_memory(recipe):
    asked = ["--memory", "0.6GB", "--device", "gpu", "train.micro_batch_size=8"]
    alone = ["train.global_batch_size=1", "train.micro_batch_size=1"]  # a dry run a policy
    shown = ok(recipe, *asked)
    assert "fits in memory: model.gradient_checkpointing=none train.micro_batch_size=8" in shown
    assert "of 600 MB" in shown
    message = refused(recipe, "--memory", "501 MB", "--device", "gpu", *alone)
    assert "not even one example per micro-batch fits in 501 MB" in message


def test_the_longest_row_is_shown_by_setting_and_auto_is_a_setting(recipe):
    asked = ["--longest-row", "--memory", "0.6GB", "--device", "gpu", "method=lora"]
    shown = ok(recipe, *asked, "model.gradient_checkpointing=auto")
    assert "fits in memory: model.gradient_checkpointing=none" in shown
    table = shown[shown.index("the longest row") :]
    assert re.search(r"none +[\d,]+ .*takes .*\n *full +[\d,]+ .*\n *offload +[\d,]+ ", table)
    assert "of main memory" in table
    missing = refused(recipe, "model.gradient_checkpointing=auto", "--device", "gpu")
    assert "model.gradient_checkpointing: auto depends on the memory of a rank" in missing


@pytest.mark.parametrize("size", ["much", "-1GB", "0", "1..2GB"])
def test_a_memory_is_a_size(size, recipe):
    assert "expected a size such as 24GB or 500MiB" in refused(recipe, f"--memory={size}")


def test_an_automatic_size_needs_a_memory(recipe):
    message = refused(recipe, "train.micro_batch_size=auto", "--device", "gpu")
    assert "name it with --memory" in message


def test_failures_on_many_nodes_are_shown_with_the_best_interval(recipe):
    out = ok(recipe, "--nodes", 2048, "--device", "cpu")
    assert "each 1 h 48 min on 2,048 nodes (6.5 per 1,000 days of a node)" in out
    assert "assumed: the run has saved nothing yet" in out
    assert "goodput      not known as it is; set --tokens-per-second" in out
    shown = ok(recipe, "--nodes", 2048, "--tokens-per-second", 1, "checkpoint.save_steps=2")
    assert "checkpoint.save_minutes: auto" in shown
    rare = as_json(recipe, "--nodes", 2048, "--node-failures", 0.65)["failures"]
    usual = as_json(recipe, "--nodes", 2048, "checkpoint.save_minutes=auto")["failures"]
    assert rare["seconds_between_failures"] == pytest.approx(10 * 86_400_000 / (6.5 * 2048))
    assert rare["best_goodput"] > usual["best_goodput"] > 0.9
    assert usual["goodput"] == usual["best_goodput"]
    assert usual["save_interval"] == usual["best_save_interval"] >= 60
    assert "failures" not in as_json(recipe)
    shown = ok(recipe, "--nodes", 2048, "--node-failures", 0.065)
    assert re.search(r"at its best .* \(checkpoint.save_minutes: [\d.]+\)", shown)
    assert "--node-failures is of --nodes" in refused(recipe, "--node-failures", 2)


def test_costs_of_failures_are_those_that_the_run_has_recorded(tmp_path, monkeypatch):
    project = Project(
        tmp_path, checkpoint={"save_steps": None, "save_minutes": "auto"}, train={"log_steps": 1}
    )
    monkeypatch.setattr("surefoot.checkpoint.saving.intervals.LEAST", 0.01)
    monkeypatch.setattr("surefoot.training.control.FIRST", 0.0)
    surefoot.train(project.recipe)
    saved = [path.name for path in project.run.glob("checkpoint-*")]
    assert len(saved) > 1, "the clock alone has saved before the end"
    found = as_json(project.recipe, "--nodes", 1)["failures"]
    assert found["is_measured"]
    assert 0 < found["stall"] < 60
    assert 0 < found["save"] < 60
    assert 0 < found["restart"] < 600
