"""``output_router_logits`` adds the loss of a mixture's routers, as in Hugging Face's Trainer."""

import sys
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
from surefoot.model.routers import check_router_loss
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


def batch_of(rows=slice(None), labels=LABELS):
    mask = MASK[rows]
    width = int(mask.sum(1).max())  # of other rows padding is more
    positions = torch.arange(width).repeat(len(mask), 1)
    return Batch(IDS[rows, :width], labels[rows, :width], positions, mask[:, :width])


def ours(model, window=None):
    """The same by the parts of a step."""
    made = trainer_of(model)
    figures = made.policy.step.gradients(
        window or [batch_of()],
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


@pytest.mark.parametrize("kind", PARAMETERS)
def test_micro_batches_have_the_loss_of_their_batch(kind, tmp_path):
    """The loss of each by itself, averaged, is another one."""
    expected, gradients = theirs(mixtures.model(kind, **KINDS[kind]), tmp_path)
    empty = batch_of(slice(0, 1), torch.full_like(LABELS, IGNORE_INDEX))  # of a rank without any
    window = [batch_of(slice(0, 1)), empty, batch_of(slice(1, 3))]
    found, _, mine = ours(mixtures.model(kind, **KINDS[kind]), window)
    assert found == pytest.approx(float(expected), rel=1e-6)
    for name, gradient in gradients.items():
        assert torch.allclose(mine[name], gradient, rtol=1e-4, atol=3e-7), name


@pytest.mark.parametrize("size", [None, "dropout"])
def test_the_shares_of_experts_are_those_of_the_pass_that_trains(size, monkeypatch):
    """Dropout draws the same in both."""
    model = mixtures.model("mixtral", **ROUTED, attention_dropout=0.5 if size else 0.0).train()
    counts = []
    own = outputs.sums_of

    def recording(*arguments):
        counts.append((found := own(*arguments)).counts[:-1])
        return found

    monkeypatch.setattr(outputs, "sums_of", recording)
    made = trainer_of(model)
    window = [batch_of(slice(0, 2)), batch_of(slice(2, 3))]
    made.policy.step.gradients(
        window,
        partial(made.stage.loss, "policy"),
        step=0,
        before=lambda i: torch.manual_seed(i),
        after=lambda i: None,
    )
    assert len(counts) == 4
    assert torch.equal(torch.stack(counts[:2]), torch.stack(counts[2:]))


def test_another_loss_of_routers_is_refused(monkeypatch):
    model = mixtures.model("mixtral", **ROUTED)
    section = ModelSection(path="unused")
    check_router_loss(model, section)
    module = sys.modules[type(model).__module__]
    own = module.load_balancing_loss_func
    monkeypatch.setattr(module, "load_balancing_loss_func", lambda *a: 2 * own(*a))
    with pytest.raises(ModelError, match="computes another loss of its routers"):
        check_router_loss(model, section)
    with pytest.raises(ModelError, match="computes another loss of its routers"):
        doge = mixtures.model("doge", output_router_logits=True)
        check_router_loss(doge, section)


def test_the_head_that_returns_log_probabilities_has_it_too():
    model = mixtures.model("mixtral", **ROUTED)
    batch = Batch(IDS, LABELS, torch.arange(12).repeat(3, 1), MASK)
    head = logprob_head_of(model)
    assert head is not None
    found = outputs.compute(model, batch, OutputSpec(("total",)), head=head)
    expected = model(input_ids=IDS, attention_mask=MASK, labels=LABELS)
    assert torch.allclose(found.router.loss(torch.ones(())), 0.5 * expected.aux_loss)


def test_packed_rows_have_it():
    model = tiny.model("mixtral", **ROUTED)
    expected = model(input_ids=IDS[:1], labels=IDS[:1]).aux_loss
    use_packed(model)
    bounds = torch.tensor([0, 12], dtype=torch.int32)
    batch = Batch(IDS[:1], IDS[:1], torch.arange(12)[None], cu_seqlens=bounds)
    found = outputs.compute(model, batch, OutputSpec(("total",)))
    assert torch.allclose(found.router.loss(torch.ones(())), 0.5 * expected)


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


def test_two_ranks_with_a_micro_batch_each_add_what_one_does_with_two(tmp_path):
    compare(2, tmp_path, parallel={}, kind="mixtral", **ROUTED)


def test_a_pipeline_refuses_it(tmp_path):
    def work(world):
        with pytest.raises(RecipeError, match="no stage of a pipeline sees the routers of all"):
            trainer(world, tmp_path, kind="mixtral", **ROUTED)

    ranks.run(2, work, pp=2)
