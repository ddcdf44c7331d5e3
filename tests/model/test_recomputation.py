"""What is recomputed in the backward pass changes no bit of a loss or gradient, and takes less."""

import pytest
import torch

import tiny
from surefoot.errors import RecipeError
from surefoot.methods import LoRA
from surefoot.model.layers import recompute_activations
from surefoot.model.section import ModelSection
from surefoot.recipe.recipe import read
from surefoot.use.estimate._dry_run import LiveBytes

POLICIES = ("none", "selective", "full", "offload")
IDS = torch.arange(2, 62).reshape(2, 30)


def outcome(policy, method=None, **changes):
    """Loss and gradients, and bytes that the forward pass keeps, with dropout everywhere."""
    inner = tiny.model(attention_dropout=0.1, num_hidden_layers=3, **changes)
    torch.manual_seed(1)
    model = inner if method is None else method.apply(inner)
    recompute_activations(inner, policy)
    model.train()
    torch.manual_seed(7)
    own = [*model.parameters(), *model.buffers()]
    with LiveBytes(own, inner.config.vocab_size, lambda: 0) as live:
        loss = model(input_ids=IDS, labels=IDS).loss
        kept = live.now.total
    loss.backward()
    return loss, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, kept


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("method", [None, LoRA(rank=2, dropout=0.2)], ids=["full", "lora"])
def test_no_policy_changes_a_bit(method, attention):
    found = {p: outcome(p, method, attn_implementation=attention) for p in POLICIES}
    loss, gradients, _ = found["none"]
    for policy, (other, theirs, _) in found.items():
        assert torch.equal(other, loss), policy
        assert theirs.keys() == gradients.keys()
        for name, gradient in gradients.items():
            assert torch.equal(theirs[name], gradient), (policy, name)
    kept = {policy: size for policy, (_, _, size) in found.items()}
    assert kept["full"] == kept["offload"] < kept["selective"] < kept["none"]


def test_the_boolean_form_is_read_and_the_policy_is_written():
    assert ModelSection(path="m", gradient_checkpointing=True).gradient_checkpointing == "full"
    assert ModelSection(path="m", gradient_checkpointing=False).gradient_checkpointing == "none"
    base = {"model": {"path": "m"}, "data": {"datasets": ["a"]}, "train": {"output_dir": "o"}}
    base |= {"stage": "sft", "method": "full", "optim": {"adamw": {}}}
    for given, policy in [(True, "full"), (False, "none"), ("offload", "offload")]:
        base["model"]["gradient_checkpointing"] = given
        assert read(base, {}).model.gradient_checkpointing == policy
    base["model"]["gradient_checkpointing"] = "sometimes"
    with pytest.raises(RecipeError, match=r"gradient_checkpointing.*selective.*'sometimes'"):
        read(base, {})


def test_selective_and_compile_do_not_go_together():
    with pytest.raises(ValueError, match="selective cannot look into layers that compile"):
        ModelSection(path="m", gradient_checkpointing="selective", compile=True)
