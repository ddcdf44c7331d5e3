"""A whole plan: what it says of data, time and memory, and that it loads nothing."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import LlavaForConditionalGeneration

import pictures
import surefoot
from each import some
from project import Project, metrics
from surefoot.errors import DataError, ModelError, RecipeError
from surefoot.model.section import recomputation
from surefoot.parallel import section
from surefoot.parallel.world import ALONE as ONE
from surefoot.recipe.recipe import load
from surefoot.recipe.recipe_data import open_codec
from surefoot.run.assembly import build
from surefoot.run.parts import RunParts
from surefoot.run.policy import open_policy
from surefoot.use.estimate import _rank_memory as rank_memory
from surefoot.use.estimate._dry_run import LiveBytes, NotRehearsedError
from surefoot.use.estimate._rank_memory import Machine
from surefoot.use.estimate.plan import make_plan, measured_speed

from .scene import head_of, total

REWARD = Path(__file__).parents[2] / "stage_rewards.py"

ALONE = Machine(1, on_gpu=False)


def plan(project, *overrides, machine=ALONE, **options):
    return make_plan(load(project.recipe, overrides), machine, **options)


@pytest.fixture
def project(tmp_path):
    sizes = {"global_batch_size": 3, "micro_batch_size": 3}
    return Project(tmp_path / "project", train=sizes)


def test_steps_and_tokens_are_those_of_the_run(project):
    asked = ("train.max_steps=null", "train.num_epochs=2", "data.val_size=4")
    before = plan(project, *asked)
    state = surefoot.train(load(project.recipe, asked)).state
    after = plan(project, *asked)
    assert before.course.steps == after.course.steps == state.global_step == 14
    assert after.course.tokens == state.num_input_tokens_seen
    assert after.rows_read is None
    assert before.rows_read == 24
    assert before.examples == after.examples == 20
    assert before.course.tokens == pytest.approx(after.course.tokens, rel=0.05)


def test_a_plan_needs_no_weights_and_leaves_nothing_behind(project):
    (project.folder / "model" / "model.safetensors").unlink()
    before = sorted(project.folder.rglob("*"))
    found = plan(project)
    assert found.parameters == found.trained_parameters > 0
    assert sorted(project.folder.rglob("*")) == before
    assert not project.run.exists()


def test_a_sample_stands_for_all_rows(project, monkeypatch):
    monkeypatch.setattr("surefoot.use.estimate._batches.ROWS", 5)
    found = plan(project)
    assert found.rows_read == 5
    assert found.examples == 24
    monkeypatch.setattr("surefoot.use.estimate._batches.ROWS", 1000)
    assert found.course.tokens == pytest.approx(plan(project).course.tokens, rel=0.1)


def test_the_speed_of_a_run_that_has_begun_gives_the_time(project):
    assert plan(project).seconds is None
    asked = plan(project, tokens_per_second=50.0)
    assert asked.seconds == pytest.approx(asked.course.tokens / 50)
    surefoot.train(load(project.recipe, ["train.max_steps=2"]))
    speeds = [line["tokens_per_second"] for line in metrics(project.run)]
    found = plan(project)
    assert min(speeds) <= found.tokens_per_second <= max(speeds)
    assert plan(project, tokens_per_second=7.0).tokens_per_second == 7.0


def test_lines_that_tell_no_speed_are_passed_over(tmp_path):
    assert measured_speed(tmp_path) is None
    records = [{"tokens_per_second": 10.0}, {"eval_loss": 1.0}, {"tokens_per_second": None}, [1]]
    lines = [*map(json.dumps, records), json.dumps({"tokens_per_second": 30}), '{"tokens_per_s']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert measured_speed(tmp_path) == 20.0


def test_a_gpu_holds_weights_as_stored_and_works_in_bfloat16(project):
    config = project.folder / "model" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "dtype": "bfloat16"}))
    lora = ("method.lora.rank=2",)
    here = plan(project, *lora)
    there = plan(project, *lora, machine=Machine(1, on_gpu=True))
    assert (here.precision, there.precision) == ("fp32", "bf16")
    assert there.memory.weights < 0.6 * here.memory.weights
    assert there.memory.gradients == here.memory.gradients, "what learns is float32 on both"


def test_several_processes_share_weights_gradients_and_states(project):
    asked = ("train.global_batch_size=8", "train.micro_batch_size=1")
    one, eight = (plan(project, *asked, machine=Machine(n, on_gpu=False)) for n in (1, 8))
    for part in ("weights", "gradients", "optimizer"):
        assert getattr(eight.memory, part) < 0.2 * getattr(one.memory, part)
    assert eight.memory.activations == one.memory.activations
    assert eight.memory.buffers > 0
    assert eight.saving.shared_memory < 0.2 * one.saving.shared_memory


def test_a_model_that_cannot_be_rehearsed_gets_the_rest_of_its_plan(project, monkeypatch):
    def fail(*_, **options):
        raise NotRehearsedError("it looks at values")

    monkeypatch.setattr(rank_memory, "dry_run_batch", fail)
    found = plan(project)
    assert found.not_known == "it looks at values"
    assert found.memory.activations == found.memory.logits == 0
    assert found.memory.weights > 0


@pytest.mark.proof
def test_an_adapter_to_go_on_from_is_planned_without_its_weights(project, tmp_path):
    surefoot.train(load(project.recipe, ["method.lora.rank=3", "train.max_steps=1"]))
    adapter = next(project.run.glob("checkpoint-*"))
    fresh = plan(project, "method.lora.rank=3")
    (adapter / "adapter_model.safetensors").unlink()
    again = plan(project, "method=lora", f"model.adapter={adapter}")
    assert again.trained_parameters == fresh.trained_parameters


def test_new_tokens_make_room_in_the_embeddings(project):
    names = [f"<new{i}>" for i in range(5)]
    more = plan(project, f"model.new_special_tokens={json.dumps(names)}")
    assert more.parameters > plan(project).parameters


@pytest.mark.parametrize(
    ("overrides", "machine", "error", "words"),
    [
        (["parallel.dp_shard=3"], Machine(4, on_gpu=False), RecipeError, "--num-processes"),
        (["parallel.pp=4"], Machine(4, on_gpu=False), RecipeError, "need as many layers"),
        ([], Machine(3, on_gpu=False), DataError, "multiple of train.micro_batch_size"),
        (["method.freeze.num_layers=99"], ALONE, RecipeError, "expected at most 3, the layers"),
        (["data.datasets=[nosuch]"], ALONE, DataError, "nosuch"),
        (["model.path=/no/such"], ALONE, ModelError, "/no/such"),
        (["data.cutoff_len=4"], ALONE, DataError, "surefoot preview"),
    ],
)
def test_what_would_stop_the_run_stops_the_plan(project, overrides, machine, error, words):
    with pytest.raises(error, match=words):
        plan(project, *overrides, machine=machine)


@pytest.mark.parametrize("size", [1, 2])
def test_an_axis_that_the_plan_does_not_know_is_refused_above_1(size, project, monkeypatch):
    monkeypatch.setattr(section, "AXES", (*section.AXES, "ep"))
    monkeypatch.setattr(section.ParallelSection, "ep", size, raising=False)
    recipe = load(project.recipe)
    if size == 1:
        assert rank_memory.mesh_of(recipe.parallel, Machine(2, on_gpu=False)).num_processes == 2
        return
    with pytest.raises(RecipeError, match=r"parallel\.ep: .* is not estimated; leave it at 1"):
        plan(project, machine=Machine(4, on_gpu=False))


@pytest.mark.proof
def test_processes_that_share_every_matrix_are_planned(project):
    asked = ("train.global_batch_size=8", "train.micro_batch_size=2", "parallel.tp=2")
    found = plan(project, *asked, machine=Machine(4, on_gpu=False))
    alone = plan(project, *asked[:2], machine=Machine(2, on_gpu=False))
    assert (found.mesh.tp, found.mesh.dp_shard, found.mesh.num_processes) == (2, 2, 4)
    assert found.course == alone.course, "tp changes nothing of what is learnt, and when"
    assert found.parameters == alone.parameters
    assert found.saving.size == alone.saving.size
    assert found.memory.weights < 0.6 * alone.memory.weights


def test_of_a_pipeline_all_is_planned_but_the_memory_of_its_stages(project):
    asked = ("train.global_batch_size=8", "train.micro_batch_size=1")
    found = plan(project, *asked, "parallel.pp=2", machine=Machine(4, on_gpu=False))
    alone = plan(project, *asked, machine=Machine(2, on_gpu=False))
    assert (found.mesh.pp, found.mesh.dp_shard, found.mesh.num_processes) == (2, 2, 4)
    assert found.course == alone.course, "pp changes nothing of what is learnt, and when"
    assert found.parameters == alone.parameters
    assert found.saving.size == alone.saving.size
    assert "the run is a pipeline (parallel.pp)" in found.not_known
    assert found.memory.weights == alone.memory.weights


@pytest.mark.parametrize("stage", some(["dpo", "rm"], ["dpo"]))
def test_pairs_are_planned_before_anybody_is_asked_about_them(stage, tmp_path):
    data = {"datasets": ["pairs"], "cache_dir": str(tmp_path / "cache")}
    train = {"global_batch_size": 3, "micro_batch_size": 3, "max_steps": 2}
    pairs = Project(tmp_path / "project", stage=stage, data=data, train=train)
    planned = plan(pairs)
    assert planned.not_known is None
    assert not (tmp_path / "cache").exists()
    state = surefoot.train(pairs.recipe).state
    assert plan(pairs).course.tokens == state.num_input_tokens_seen


def test_sampled_responses_are_planned_behind_their_prompts(tmp_path):
    settings = {"group_size": 3, "max_new_tokens": 6, "passes": 2, "mini_batches": 3}
    stage = {"grpo": {"reward": f"{REWARD}:varied", **settings}}
    train = {"global_batch_size": 4, "micro_batch_size": 2, "max_steps": None, "num_epochs": 0.5}
    data = {"max_samples": 16, "packing": False}  # packed, responses share prompts, and have fewer
    sampled = Project(tmp_path / "project", stage=stage, train=train, data=data)
    found = plan(sampled)
    assert found.heaviest.trained == 2 * 6
    assert found.heaviest.tokens > 2 * 6
    state = surefoot.train(sampled.recipe).state
    assert found.course.steps == state.global_step == 2 * 2 * 3
    assert found.course.windows == 2
    assert found.course.gradient_accumulation_steps == 2, (
        "12 responses in 3 parts of 2 micro-batches"
    )
    assert state.num_input_tokens_seen <= found.course.tokens
    assert found.course.tokens == pytest.approx(state.num_input_tokens_seen, rel=0.15)
    assert found.course.trained_tokens == 2 * 4 * 3 * 6 * 2, "windows, prompts, group, passes"
    trainer = build(load(sampled.recipe, ["checkpoint.resume=none", "train.output_dir=other"]))
    prompts = trainer.windows.loader.order.examples.lengths
    assert trainer.policy.network.options.longest == prompts.max() + 6


FULL = "full"
ADAPTERS = {"lora": {"rank": 4, "parts": ["tower", "language"]}}


@pytest.mark.parametrize(
    ("kind", "recomputes", "method"),
    some(
        [
            *((kind, False, FULL) for kind in pictures.KINDS),
            ("gemma3", True, FULL),
            *((kind, False, ADAPTERS) for kind in pictures.KINDS),
        ],
        [("gemma3", True, FULL), ("idefics3", False, ADAPTERS)],
    ),
)
def test_the_layers_for_pictures_are_counted_as_they_really_keep(
    kind, recomputes, method, tmp_path
):
    """Pictures of three sizes, of which only the largest is measured."""
    base = pictures.save_model(tmp_path / "base", kind)
    rows = pictures.rows(tmp_path)
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    train = {"global_batch_size": 6, "micro_batch_size": 6, "precision": "fp32"}
    made = pictures.recipe(tmp_path, base, train=train, method=method)
    model = replace(made.model, gradient_checkpointing=recomputation(recomputes))
    made = replace(made, model=model)
    found = make_plan(made, ALONE)
    assert found.not_known is None
    assert found.pictures.count == 6
    codec = open_codec(made, base)
    items = pictures.items(codec, tmp_path)
    batch = RunParts.around(made, codec, base).collation.batch(items).read()
    parts = RunParts.around(made, codec, base).for_rows(0, pictures.probes(made, codec))
    network = open_policy(parts, ONE, needs_start=False)
    model = network.module.train()
    text = replace(batch, media={}, axes=None)
    if kind == "gemma3":
        text = replace(text, media={"token_type_ids": batch.media["token_type_ids"]})
    both = living(model, batch)
    if method is not FULL:  # gradients reach the frozen embeddings beside those of pictures
        network.inner.enable_input_require_grads()
    expected = both - living(model, text)
    assert found.pictures.num_bytes == pytest.approx(expected, rel=0.02)
    assert found.memory.activations == pytest.approx(both, rel=0.12 if recomputes else 0.02)


def test_layers_for_pictures_that_do_not_run_alone_are_said_not_to_be_known(tmp_path, monkeypatch):
    base = pictures.save_model(tmp_path / "base", "llava")
    rows = pictures.rows(tmp_path)
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.delattr(LlavaForConditionalGeneration, "get_image_features")
    found = make_plan(pictures.recipe(tmp_path, base), ALONE)
    assert "layers of LlavaForConditionalGeneration for pictures cannot be run" in found.not_known


def living(model, batch):
    """Bytes that are there between the forward and the backward pass."""
    live = LiveBytes([*model.parameters(), *model.buffers()], 0)
    with live:
        loss = total(model, batch, head_of(model))
        now = live.now.total
    assert loss.requires_grad
    return now
