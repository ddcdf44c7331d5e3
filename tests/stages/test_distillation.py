"""A student and its teacher: one model or two, resumed, measured, planned for, refused."""

import logging
import shutil
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

import surefoot
from project import Project, assert_same, final_weights, losses, metrics, model_folder
from surefoot.data.text.collation import collate
from surefoot.errors import ModelError, RecipeError
from surefoot.model.tokenizer import load_tokenizer
from surefoot.parallel.world import ALONE
from surefoot.recipe.recipe import load
from surefoot.run.assembly import build
from surefoot.run.parts import RunParts
from surefoot.use.estimate import _dry_run as dry_run
from surefoot.use.estimate._fake_tensors import HoldingOptions
from surefoot.use.evaluation import staying
from surefoot.use.model_loading import PLAINLY
from surefoot.use.run_evaluation import evaluate_run


def project(folder, *, settings=None, **sections):
    """A student of a llama and a wider qwen3 as its teacher."""
    stage = {"distill": {"teacher": "teacher", **(settings or {})}}
    data = {"datasets": ["sums"], "cutoff_len": 64, "cache_dir": str(folder / "cache")}
    sections = {"data": {**data, **sections.pop("data", {})}, **sections}
    made = Project(folder, stage=stage, **sections)
    model_folder(folder / "teacher", "qwen3", hidden_size=48)
    return made


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return project(tmp_path_factory.mktemp("distill"), train={"max_steps": 3})


ONE_SAVE = {"checkpoint": {"save_steps": None}, "optim": {"adamw": {"learning_rate": 0.01}}}


def test_a_student_nears_its_teacher(tmp_path):
    """The teacher has learned the sums, the student is random and smaller. Of each third row only
    the divergence is measured."""
    taught = Project(
        tmp_path / "taught",
        "qwen3",
        train={"max_steps": 25, "global_batch_size": 8},
        **ONE_SAVE,
    )
    surefoot.train(taught.recipe)
    student = project(
        tmp_path / "student",
        settings={"teacher": str(taught.run / "checkpoint-25")},
        data={"val_size": 6},
        train={"max_steps": 25, "global_batch_size": 8, "eval_steps": 25},
        method="full",
        generate={"max_new_tokens": 2},
        **ONE_SAVE,
    )
    start = evaluated(student, "base")
    surefoot.train(student.recipe)
    found = [row["eval_divergence"] for row in metrics(student.run) if "eval_loss" in row]
    assert start > 1
    assert found[-1] < start / 4
    assert evaluated(student) == pytest.approx(min(found), rel=1e-4)


def evaluated(student, model=None):
    none = lambda *_: nullcontext(lambda _: None)  # noqa: E731
    found = evaluate_run(load(student.recipe), ALONE, PLAINLY, progress=none, model=model)
    return found.overall.metrics["divergence"]


def test_the_base_under_an_adapter_is_its_teacher_without_a_second_model(tmp_path, caplog):
    """To the bits as a copy of it would be; what is frozen of the adapter stays so."""
    caplog.set_level(logging.INFO)
    method = {"lora": {"rank": 2, "dropout": 0.2, "freeze_a": True}}
    settings = {"teacher": None, "on_policy": 0.5, "max_new_tokens": 5, "sft_weight": 1.0}
    one = project(tmp_path, settings=settings, method=method, train={"max_steps": 5})
    surefoot.train(one.recipe)
    assert "teacher: the base under the adapter, without a second model" in caplog.text
    shutil.copytree(tmp_path / "model", tmp_path / "copy")
    two = {
        "train.output_dir": str(tmp_path / "two"),
        "stage.distill.teacher": str(tmp_path / "copy"),
    }
    caplog.clear()
    surefoot.train(one.recipe, **two)
    assert "without a second model" not in caplog.text
    first, *_, last = metrics(one.run)
    assert first["divergence"] == pytest.approx(0, abs=1e-6)
    assert last["divergence"] > 1e-4
    assert losses(tmp_path / "two") == losses(one.run)
    assert_same(final_weights(tmp_path / "two"), final_weights(one.run))


@pytest.mark.parametrize(
    "method",
    [pytest.param("full", marks=pytest.mark.proof), pytest.param("lora", marks=pytest.mark.proof)],
)
def test_batches_do_not_change_the_loss(method, tmp_path):
    """In packed micro-batches of 1 or 2, and a padded one of 4, with own responses."""
    settings = {"on_policy": 0.5, "max_new_tokens": 6, "sft_weight": 0.3, "divergence": "jsd"}
    if method == "lora":
        settings["teacher"] = None
    found = []
    one = project(tmp_path, settings=settings, method=method, train={"max_steps": 2})
    for name, options in {
        "packed": {},
        "one": {"train.micro_batch_size": 1},
        "four": {"train.micro_batch_size": 4, "data.packing": False},
    }.items():
        run = tmp_path / name
        surefoot.train(one.recipe, **{**options, "train.output_dir": str(run)})
        found.append([[r[n] for n in ("loss", "grad_norm", "sft_loss")] for r in metrics(run)])
    for other in found[1:]:
        for ours, theirs in zip(other, found[0], strict=True):
            assert ours == pytest.approx(theirs, abs=2e-5, rel=2e-5)


def test_a_teacher_of_other_tokens_is_refused_before_anything_is_encoded(made, tmp_path):
    other = model_folder(tmp_path / "other")
    load_tokenizer(other, new_special_tokens=["<other>"]).save_pretrained(other)
    options = {"train.output_dir": str(tmp_path / "run"), "data.cache_dir": str(tmp_path / "c")}
    with pytest.raises(RecipeError, match=r"the teacher .* has a different tokenizer from"):
        surefoot.train(made.recipe, **options, **{"stage.distill.teacher": str(other)})
    assert not (tmp_path / "c").exists()


def test_a_teacher_without_embeddings_for_all_tokens_is_refused(made, tmp_path):
    options = {"train.output_dir": str(tmp_path / "run"), "model.new_special_tokens": ["<new>"]}
    with pytest.raises(RecipeError, match="has embeddings for 296 tokens, and the tokenizer"):
        surefoot.train(made.recipe, **options)


def test_a_teacher_with_padded_embeddings_is_taken(made, tmp_path):
    wide = tmp_path / "wide"
    shutil.copytree(made.folder / "teacher", wide)
    model = AutoModelForCausalLM.from_pretrained(wide)
    torch.manual_seed(0)
    model.resize_token_embeddings(320, mean_resizing=False)
    model.save_pretrained(wide)
    runs = []
    for name, teacher in (("plain", str(made.folder / "teacher")), ("wide", str(wide))):
        options = {"train.output_dir": str(tmp_path / name), "stage.distill.teacher": teacher}
        surefoot.train(made.recipe, **options)
        runs.append(list(losses(tmp_path / name).values()))
    assert runs[0] == pytest.approx(runs[1], rel=1e-6)


def test_a_teacher_that_has_changed_is_refused_at_a_resume(made, tmp_path):
    teacher = tmp_path / "teacher"
    shutil.copytree(made.folder / "teacher", teacher)
    options = {"train.output_dir": str(tmp_path / "run"), "stage.distill.teacher": str(teacher)}
    surefoot.train(made.recipe, **options)
    model = AutoModelForCausalLM.from_pretrained(teacher)
    torch.nn.init.normal_(model.model.norm.weight)
    model.save_pretrained(teacher)
    with pytest.raises(ModelError, match=r"the teacher: .* has changed since"):
        surefoot.train(made.recipe, **options, **{"train.max_steps": 5})


def test_a_teacher_takes_no_gradients_and_no_dropout(made):
    trainer = build(load(made.recipe, ["train.output_dir=unused"]))
    network = trainer.policy.network
    teacher = network.engine.runner.targets["teacher"].__self__.model
    assert not teacher.training
    assert not any(p.requires_grad for p in teacher.parameters())
    assert set(trainer.states) == {
        *("model", "optimizer", "scaler", "loader", "trainer", "callbacks", "random")
    }


def test_an_adapter_of_the_output_head_is_refused_before_the_first_step(made, tmp_path):
    options = {"train.output_dir": str(tmp_path / "run"), "method": "lora"}
    with pytest.raises(ModelError, match="leave lm_head out of the method"):
        surefoot.train(made.recipe, **options, **{"method.lora.modules_to_save": ["lm_head"]})
    assert not list((tmp_path / "run").glob("checkpoint-*"))


def test_two_distributions_are_not_compared_on_several_ranks(made):
    with pytest.raises(RecipeError, match="evaluate this run on one process"):
        staying(RunParts.to_measure(load(made.recipe)), None, SimpleNamespace(size=2))


def test_a_plan_counts_the_teacher(made):
    setting = HoldingOptions("fp32", torch.float32)
    plain, beside = (
        dry_run.build(RunParts.unopened(load(made.recipe, options)), setting)
        for options in (["stage=sft"], [])
    )
    teacher = AutoModelForCausalLM.from_pretrained(made.folder / "teacher")
    own = sum(t.nbytes for t in (*teacher.parameters(), *teacher.buffers()))
    assert size_of(beside) - size_of(plain) == own
    batch = collate([{"input_ids": [3] * 9, "labels": [-100] * 4 + [3] * 5}], packing=True)
    measured = dry_run.dry_run_batch(beside, batch)
    assert measured.at_peak.logits >= 3 * 5 * 296 * 4  # of both models, and a gradient
    assert measured.kept.logits == 0


def size_of(skeleton):
    return sum(weight.size * weight.item_size for weight in skeleton.weights)
