"""From a recipe to a trained model in Python: what is built, and what is refused."""

import json
import shutil
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch
from peft import PeftModel
from peft.tuners.lora import Linear
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import surefoot
import tiny
from project import Project, losses
from surefoot.errors import CheckpointError, ModelError, RecipeError
from surefoot.model.numerics import LossScaler
from surefoot.parallel.world import ALONE
from surefoot.recipe.recipe import load
from surefoot.run.policy import compare_prepared
from surefoot.run.training_run import build
from surefoot.training.callback import Kernels, TrainerCallback

SHORT = {"max_steps": 3}


def test_train_takes_a_path_a_mapping_or_a_recipe_and_overrides(tmp_path):
    project = Project(tmp_path, train=SHORT)
    sections = json.loads(project.recipe.read_text())
    sections["model"]["path"] = str(tmp_path / "model")
    sections["data"]["dataset_dir"] = str(tmp_path / "data")
    runs = [str(tmp_path / name) for name in "abc"]
    states = [
        surefoot.train(str(project.recipe), train={"output_dir": runs[0]}),
        surefoot.train(sections, **{"train.output_dir": runs[1]}),
        surefoot.train(load(project.recipe, [f"train.output_dir={runs[2]}"])),
    ]
    assert [s.global_step for s in states] == [3, 3, 3]
    first, *others = [losses(tmp_path / name) for name in "abc"]
    assert others == [first, first]


def test_callbacks_of_the_user_see_the_run_and_may_stop_it(tmp_path):
    class StopEarly(TrainerCallback):
        def on_init_end(self, args, state, control):
            self.steps_per_epoch = args.steps_per_epoch

        def on_step_end(self, args, state, control):
            control.should_training_stop = state.global_step == 2

    mine = StopEarly()
    state = surefoot.train(Project(tmp_path).recipe, callbacks=[mine])
    assert (state.global_step, mine.steps_per_epoch) == (2, 6)


def test_the_run_folder_tells_the_whole_story(tmp_path):
    project = Project(tmp_path, data={"val_size": 4}, train={**SHORT, "eval_steps": 3})
    surefoot.train(project.recipe)
    names = {p.name for p in project.run.iterdir()} - {".lock"}
    assert names == {
        "README.md",
        "recipe.yaml",
        "metrics.jsonl",
        "all_results.json",
        "loss.png",
        "checkpoint-3",
    } | {
        "launches.jsonl",
        ".heartbeat.json",
        "rows.xxh",
        "steps.bin",
        "rows.f32",
    }
    assert load(project.run / "recipe.yaml") == load(project.recipe)
    results = json.loads((project.run / "all_results.json").read_text())
    assert results["train_loss"] == pytest.approx(sum(losses(project.run).values()) / 3)
    assert results["eval_perplexity"] == pytest.approx(2.718281828 ** results["eval_loss"])
    assert results["save_blocking_seconds"] > 0


def test_speeds_count_the_rows_steps_and_batches_that_there_were(tmp_path):
    epochs = {"num_epochs": 1.5, "max_steps": None, "global_batch_size": 8, "micro_batch_size": 2}
    project = Project(tmp_path, data={"val_size": 6}, train={**epochs, "eval_epoch": True})
    surefoot.train(project.recipe)
    results = json.loads((project.run / "all_results.json").read_text())
    counts = {
        name: value * results[f"{name.partition('_')[0]}_runtime"]
        for name, value in results.items()
        if name.endswith("_per_second")
    }
    expected = {"train_samples": 18 + 2 * 8, "train_steps": 5, "eval_samples": 6, "eval_steps": 3}
    assert {n.removesuffix("_per_second"): v for n, v in counts.items()} == pytest.approx(
        {**expected, "train_tokens": results["num_input_tokens_seen"]}
    )


def test_the_saved_tokenizer_has_the_eos_token_of_the_recipe_and_the_run_its_own(tmp_path):
    """It may be set later: what is trained does not depend on it."""
    project = Project(tmp_path, train={"max_steps": 4}, checkpoint={"save_steps": 2})
    surefoot.train(project.recipe)
    before = losses(project.run)
    shutil.rmtree(project.run / "checkpoint-4")
    surefoot.train(project.recipe, model={"eos_token": "<|im_end|>"})
    names = [f"checkpoint-{step}" for step in (2, 4)]
    saved = [AutoTokenizer.from_pretrained(project.run / name).eos_token for name in names]
    assert saved == ["<|endoftext|>", "<|im_end|>"]
    assert losses(project.run) == before
    with pytest.raises(RecipeError, match=r"model.eos_token: 'nix' is no token of .*; name one"):
        surefoot.train(project.recipe, model={"eos_token": "nix"}, train={"max_steps": 5})


def test_the_mean_loss_of_a_resumed_run_is_that_of_all_its_steps(tmp_path):
    project = Project(tmp_path, train=SHORT)
    surefoot.train(project.recipe)
    surefoot.train(project.recipe, train={"max_steps": 6})
    results = json.loads((project.run / "all_results.json").read_text())
    assert results["train_loss"] == pytest.approx(sum(losses(project.run).values()) / 6)


def test_a_resumed_run_reads_no_weights_that_its_checkpoint_has(tmp_path):
    same = {"method": "full", "data": {"packing": True}, "train": {"max_steps": 4}}
    same["optim"] = {"adamw": {"learning_rate": 0.003, "schedule": "constant"}}
    project, twin = (Project(tmp_path / name, **same) for name in "ab")
    surefoot.train(twin.recipe)
    surefoot.train(project.recipe, train={"max_steps": 2})
    path = project.folder / "model" / "model.safetensors"
    zeros = {name: torch.zeros_like(tensor) for name, tensor in load_file(path).items()}
    save_file(zeros, path, {"format": "pt"})
    surefoot.train(project.recipe)
    assert losses(project.run) == losses(twin.run)


@pytest.mark.proof
def test_recomputing_activations_changes_no_loss(tmp_path):
    plain = Project(tmp_path / "a", train=SHORT, optim={"adamw": {"learning_rate": 0.01}})
    recomputed = Project(
        tmp_path / "b",
        train=SHORT,
        optim={"adamw": {"learning_rate": 0.01}},
        model={"gradient_checkpointing": True},
    )
    for method in ("full", "lora"):
        runs = [str(p.folder / method) for p in (plain, recomputed)]
        for project, run in zip((plain, recomputed), runs, strict=True):
            surefoot.train(project.recipe, method=method, train={"output_dir": run})
        first, second = (losses(p.folder / method) for p in (plain, recomputed))
        assert second == pytest.approx(first, rel=1e-6)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """The same of an adapter."""
    project = Project(tmp_path_factory.mktemp("adapted"), method={"lora": {"rank": 3}}, train=SHORT)
    surefoot.train(project.recipe)
    return project


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A run of a few steps as the recipe says."""
    project = Project(tmp_path_factory.mktemp("plain"), train=SHORT)
    surefoot.train(project.recipe)
    return project


@pytest.mark.parametrize(
    "other",
    [
        pytest.param({"model": {"attention": "eager"}}, marks=pytest.mark.proof),
        {"model": {"attention": "sdpa"}},
        {"data": {"packing": False}},
    ],
    ids=["eager", "sdpa", "padded"],
)
def test_attention_kernels_and_padded_rows_give_the_same_losses(other, plain, tmp_path):
    surefoot.train(plain.recipe, **other, **{"train.output_dir": str(tmp_path)})
    assert losses(tmp_path) == pytest.approx(losses(plain.run), rel=1e-4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU computes in fp16")
def test_fp16_is_fp32_on_a_cpu_also_for_a_checkpoint_that_has_its_scale(plain, tmp_path, caplog):
    """To the bit. With a scale, a loss is divided by its tokens before its gradients are computed,
    so the run that saved it is the plain one up to rounding."""
    fp16 = {"train.precision": "fp16", "checkpoint.save_steps": 1, "checkpoint.keep": None}
    before = build(load(plain.recipe, {**fp16, "train.output_dir": str(tmp_path)}))
    before.policy.step.scaler = LossScaler(enabled=True)
    before.fit()
    assert '"scale": 65536.0' in (tmp_path / "checkpoint-1" / "state.json").read_text()
    for precision in ("fp16", "fp32"):
        more = {"train.output_dir": str(tmp_path / precision), "train.precision": precision}
        more["checkpoint.resume"] = str(tmp_path / "checkpoint-1")
        surefoot.train(plain.recipe, **more)
    assert "train.precision: fp16 is computed in fp32 on a CPU" in caplog.text
    resumed = losses(tmp_path / "fp16")
    assert [*resumed] == [1, 2, 3]
    assert resumed == losses(tmp_path / "fp32")
    assert resumed == pytest.approx(losses(plain.run), rel=1e-6)


def test_a_run_keeps_the_attention_of_its_packed_rows(plain):
    newest = plain.run / "checkpoint-3"
    assert build(load(plain.recipe), resume=newest).state.kernels.packed_attention == "sdpa"
    chosen = load(plain.recipe, {"model.attention": "eager"})
    assert build(chosen).state.kernels.packed_attention is None


def test_new_tokens_need_embeddings_that_learn(tmp_path):
    project = Project(tmp_path, train=SHORT, model={"new_special_tokens": ["<call>", "<end>"]})
    with pytest.raises(RecipeError, match=r"new_special_tokens.*modules_to_save"):
        surefoot.train(project.recipe, method="lora")


@pytest.mark.parametrize("kind", [pytest.param("llama", marks=pytest.mark.proof), "qwen2"])
def test_new_tokens_are_saved_with_full_weights(kind, tmp_path):
    tokens = ["<call>", "<end>"]
    project = Project(tmp_path, kind=kind, train=SHORT, model={"new_special_tokens": tokens})
    surefoot.train(project.recipe)
    opened = AutoModelForCausalLM.from_pretrained(project.run / "checkpoint-3")
    tokenizer = AutoTokenizer.from_pretrained(project.run / "checkpoint-3")
    assert opened.get_input_embeddings().num_embeddings == len(tokenizer)
    assert [len(tokenizer.encode(token)) for token in tokens] == [1, 1]


def test_training_goes_on_from_an_adapter(adapted, tmp_path):
    first = {"adapter": str(adapted.run / "checkpoint-3")}
    surefoot.train(adapted.recipe, model=first, train={"output_dir": str(tmp_path)})
    base = AutoModelForCausalLM.from_pretrained(adapted.folder / "model")
    more = PeftModel.from_pretrained(base, tmp_path / "checkpoint-3")
    assert more.peft_config["default"].r == 3
    assert losses(tmp_path)[1] < losses(adapted.run)[1]


@pytest.mark.parametrize("broken", ["missing", "truncated", "pickle"])
def test_an_adapter_that_cannot_be_read_is_named(broken, adapted, tmp_path):
    folder = shutil.copytree(adapted.run / "checkpoint-3", tmp_path / "checkpoint-3")
    weights = folder / "adapter_model.safetensors"
    if broken == "truncated":
        weights.write_bytes(weights.read_bytes()[:-9])
    else:
        weights.rename(folder / ("adapter_model.bin" if broken == "pickle" else "other"))
    options = {"model": {"adapter": str(folder)}, "train": {"output_dir": str(tmp_path / "x")}}
    with pytest.raises((CheckpointError, ModelError), match=r"adapter_model\.safetensors"):
        surefoot.train(adapted.recipe, **options)


def test_a_padded_vocabulary_stays_padded(tmp_path):
    project = Project(tmp_path, train=SHORT)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    model.resize_token_embeddings(320)
    model.save_pretrained(tmp_path / "model")
    surefoot.train(project.recipe)
    opened = AutoModelForCausalLM.from_pretrained(project.run / "checkpoint-3")
    assert opened.get_input_embeddings().num_embeddings == 320


def test_optimizer_state_lies_under_the_names_of_the_weights(plain, adapted):
    for project, file in ((plain, "model"), (adapted, "adapter_model")):
        names = {}
        for stem in (file, "optimizer"):
            path = project.run / "checkpoint-3" / f"{stem}.safetensors"
            names[stem] = load_file(path).keys()
        states = ("exp_avg", "exp_avg_sq", "step")
        assert names["optimizer"] == {f"{n}.{s}" for n in names[file] for s in states}


def test_random_numbers_do_not_depend_on_what_ran_before(tmp_path):
    project = Project(tmp_path, method={"lora": {"dropout": 0.3}}, train=SHORT)
    surefoot.train(project.recipe)
    torch.rand(1000)
    surefoot.train(project.recipe, train={"output_dir": str(tmp_path / "again")})
    assert losses(tmp_path / "again") == losses(project.run)


def test_build_gives_a_trainer_that_has_not_started(tmp_path):
    trainer = build(load(Project(tmp_path).recipe))
    assert trainer.state.global_step == 0
    assert trainer.state.max_steps == 12
    assert not list(tmp_path.glob("run/checkpoint-*"))


def test_an_adapter_new_or_continued_computes_in_one_pass(adapted, tmp_path):
    recipe = load(adapted.recipe, {"train.output_dir": str(tmp_path / "more")})
    for adapter in (None, adapted.run / "checkpoint-3"):
        model = replace(recipe.model, adapter=adapter)
        policy = build(replace(recipe, model=model)).policy.module
        adapted = [m for m in policy.modules() if isinstance(m, Linear)]
        assert adapted
        assert all("forward" in vars(layer) for layer in adapted)


@pytest.mark.parametrize("change", ["buffer", "attention", "machine", "nothing"])
def test_a_resume_says_if_the_model_is_prepared_otherwise(change, caplog):
    model = tiny.model()
    head = SimpleNamespace(head=object())
    network = SimpleNamespace(
        world=ALONE,
        module=model,
        inner=model,
        engine=SimpleNamespace(runner=head),
        options=SimpleNamespace(precision="fp32"),
    )
    kernels = Kernels()
    compare_prepared(kernels, network)
    assert not caplog.records
    saved = Kernels()
    saved.load_state_dict({"kernels": asdict(kernels)})
    if change == "buffer":
        model.model.rotary_emb.inv_freq[0] += 1
    if change in ("attention", "machine"):
        model.set_attn_implementation("eager")
    if change == "machine":
        saved.prepared["machine"] = "cuda"
    compare_prepared(saved, network)
    words = {"buffer": ["hash of buffers: "], "attention": ["sdpa, now eager"]}.get(change, [])
    assert len(caplog.records) == len(words)
    assert all(word in caplog.text for word in words)
