"""``output_router_logits`` adds the loss of a mixture's routers, as in Hugging Face's Trainer."""

from functools import partial

import pytest
import torch
from transformers import Trainer, TrainingArguments

import mixtures
import ranks
import small
import tiny
from spread import compare, trainer
from surefoot.batch import IGNORE_INDEX, Batch, OutputSpec
from surefoot.errors import ModelError, RecipeError
from surefoot.model import outputs
from surefoot.model.isolation import use_packed
from surefoot.model.loading import load_model
from surefoot.model.outputs import logprob_head_of
from surefoot.model.section import ModelSection
from surefoot.network.draft import NetworkOptions
from surefoot.network.open import open_network
from surefoot.parallel.world import ALONE
from surefoot.training.losses import with_perplexity

ROUTED = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
KINDS = {
    "mixtral": ROUTED,
    "gpt_oss": ROUTED,
    "jetmoe": {"output_router_logits": True, "aux_loss_coef": 0.5},
}
MORE = ("qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "ernie4_5_moe", "minimax", "jamba")
KINDS |= dict.fromkeys(MORE, ROUTED)
FEW = ("mixtral", "gpt_oss", "jetmoe")
PARAMETERS = [k if k in FEW else pytest.param(k, marks=pytest.mark.proof) for k in KINDS]
IDS = torch.arange(3, 39).view(3, 12)
MASK = torch.tensor([[1] * 12, [1] * 9 + [0] * 3, [1] * 5 + [0] * 7])
LABELS = IDS.where(MASK.bool() & (torch.arange(12) > 2), IGNORE_INDEX)
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def theirs(model, folder):
    """The Trainer's own loss and gradients of one step."""
    arguments = TrainingArguments(folder, use_cpu=True, report_to=[], disable_tqdm=True)
    inputs = {"input_ids": IDS, "attention_mask": MASK, "labels": LABELS}
    loss = Trainer(model, arguments).training_step(
        model, inputs, num_items_in_batch=(LABELS[:, 1:] != IGNORE_INDEX).sum()
    )
    return loss, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def ours(model):
    """The same by the parts of a step."""
    made = trainer_of(model)
    batch = Batch(IDS, LABELS, torch.arange(12).repeat(3, 1), MASK)
    figures = made.policy.step.gradients(
        [batch],
        partial(made.stage.loss, "policy"),
        step=0,
        before=lambda i: None,
        after=lambda i: None,
    )
    found = figures.read()
    means = {name: value / found.weight for name, value in found.metrics.items()}
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return found.loss / found.weight, means, gradients


def trainer_of(model, folder=None):
    return small.trainer(folder or "unused", model=model, packing=False, max_grad_norm=0.0)


@pytest.mark.parametrize("kind", PARAMETERS)
def test_loss_and_gradients_of_a_step_are_the_trainer_s(kind, tmp_path):
    plain = ours(mixtures.model(kind))
    expected, gradients = theirs(mixtures.model(kind, **KINDS[kind]), tmp_path)
    found, means, mine = ours(mixtures.model(kind, **KINDS[kind]))
    assert found == pytest.approx(float(expected), rel=1e-6)
    assert found == pytest.approx(plain[0] + means["router_loss"], rel=1e-6)
    assert means["router_loss"] > 0.1
    assert "router_loss" not in plain[1], "without the setting there is no such loss"
    assert mine.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert torch.allclose(mine[name], gradient, rtol=1e-4, atol=2e-7), name


def test_the_head_that_returns_log_probabilities_has_it_too():
    model = mixtures.model("mixtral", **ROUTED)
    batch = Batch(IDS, LABELS, torch.arange(12).repeat(3, 1), MASK)
    head = logprob_head_of(model)
    assert head is not None
    found = outputs.compute(model, batch, OutputSpec(("total",)), head=head)
    expected = model(input_ids=IDS, attention_mask=MASK, labels=LABELS)
    assert torch.equal(found.router_loss, 0.5 * expected.aux_loss)


def test_packed_rows_have_it():
    model = tiny.model("mixtral", **ROUTED)
    expected = model(input_ids=IDS[:1], labels=IDS[:1]).aux_loss
    use_packed(model)
    bounds = torch.tensor([0, 12], dtype=torch.int32)
    batch = Batch(IDS[:1], IDS[:1], torch.arange(12)[None], cu_seqlens=bounds)
    found = outputs.compute(model, batch, OutputSpec(("total",)))
    assert torch.allclose(found.router_loss, 0.5 * expected)


@pytest.mark.parametrize("kind", ["mixtral", "jetmoe"])
def test_a_recipe_sets_the_coefficient(kind, tmp_path):
    mixtures.model(kind).save_pretrained(tmp_path)
    section = ModelSection(path=str(tmp_path), router_aux_loss_coef=0.5)
    model = load_model(tmp_path, section, dtype=torch.float32)
    expected = theirs(mixtures.model(kind, **KINDS[kind]), tmp_path / "out")[0]
    assert ours(model)[0] == pytest.approx(float(expected), rel=1e-6)
    model.save_pretrained(tmp_path / "saved")
    again = load_model(tmp_path / "saved", ModelSection(path="unused"), dtype=torch.float32)
    assert ours(again)[0] == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("kind", ["llama", "deepseek_v3"])
def test_a_coefficient_of_what_the_model_does_not_compute_is_refused(kind, tmp_path):
    made = tiny.model() if kind == "llama" else mixtures.model(kind)
    made.config.update({"output_router_logits": False, "router_aux_loss_coef": 0.1})
    made.save_pretrained(tmp_path)
    section = ModelSection(path=str(tmp_path), router_aux_loss_coef=0.5)
    with pytest.raises(
        ModelError, match=r"router_aux_loss_coef: .* computes no loss of its routers"
    ):
        open_network(tmp_path, section, None, ALONE, NetworkOptions())
    tiny.model().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"router_aux_loss_coef: .* has no loss of routers"):
        open_network(tmp_path, section, None, ALONE, NetworkOptions())


def test_perplexity_is_of_the_labels_alone():
    means = with_perplexity(None, {"loss": 3.0, "router_loss": 1.0})
    assert means["perplexity"] == pytest.approx(torch.tensor(2.0).exp().item())


@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param({}, marks=pytest.mark.proof),
        pytest.param({"tp": 2}, marks=pytest.mark.proof),
        {"tp": 2, "sequence_parallel": True},
    ],
    ids=["dp_shard", "tp", "sequence"],
)
def test_two_ranks_add_what_one_does(parallel, tmp_path):
    settings = {"train": {"micro_batch_size": 1}, "vocab_size": 97}
    compare(2, tmp_path, parallel=parallel, kind="mixtral", **ROUTED, **settings)


def test_a_pipeline_refuses_it(tmp_path):
    def work(world):
        with pytest.raises(RecipeError, match="no stage of a pipeline sees the routers of all"):
            trainer(world, tmp_path, kind="mixtral", **ROUTED)

    ranks.run(2, work, pp=2)
