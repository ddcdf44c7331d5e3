"""What does not learn costs nothing on the way back, and keeps nothing on the way there."""

import pytest
import torch

import tiny
from surefoot.methods import Freeze, LoRA
from surefoot.model.layers import recompute_activations

IDS = torch.arange(2, 12)[None]


def layers(model):
    return model.get_submodule("model.layers")


def kept_and_connected(inner):
    """For each layer: how many tensors it keeps, and whether its result has a gradient."""
    kept, connected, here = [], [], [None]

    def enter(index):
        return lambda *_: here.__setitem__(0, index)

    def leave(_module, _args, output):
        here[0] = None
        connected.append(output.requires_grad)

    for index, layer in enumerate(layers(inner)):
        layer.register_forward_pre_hook(enter(index))
        layer.register_forward_hook(leave)
    pack = lambda t: kept.append(here[0]) or t  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = inner(input_ids=IDS).logits.sum()
    loss.backward()
    return [kept.count(i) for i in range(len(layers(inner)))], connected


@pytest.mark.parametrize("recompute", [False, True])
def test_below_the_lowest_layer_that_learns_nothing_is_kept(recompute):
    inner = Freeze(num_layers=1).apply(tiny.model()).train()
    if recompute:
        recompute_activations(inner)
    kept, connected = kept_and_connected(inner)
    assert kept[:2] == [0, 0]
    assert kept[2] > 0
    assert connected == [False, False, True]


@pytest.mark.parametrize("recompute", [False, True])
def test_an_adapter_in_the_last_layer_leaves_those_before_it_alone(recompute):
    model = LoRA(rank=2).apply(tiny.model()).train()
    inner = model.get_base_model()
    for layer in layers(inner)[:2]:
        layer.requires_grad_(False)
    if recompute:
        recompute_activations(inner)
    kept, connected = kept_and_connected(inner)
    assert kept[:2] == [0, 0]
    assert connected == [False, False, True]


@pytest.mark.parametrize("recompute", [False, True])
def test_frozen_embeddings_have_no_gradient(recompute):
    model = LoRA(rank=2).apply(tiny.model()).train()
    inner = model.get_base_model()
    if recompute:
        recompute_activations(inner)
    found = []
    inner.get_input_embeddings().register_forward_hook(lambda m, a, out: found.append(out))
    model(input_ids=IDS).logits.sum().backward()
    assert [out.requires_grad for out in found] == [False]
    learning = [p for p in model.parameters() if p.requires_grad]
    assert learning
    assert all(p.grad is not None for p in learning)


def test_only_layers_that_learn_are_recomputed():
    inner = Freeze(num_layers=1).apply(tiny.model()).train()
    recompute_activations(inner)
    runs = [0, 0, 0]
    for index, layer in enumerate(layers(inner)):

        def count(_module, _args, index=index):
            runs[index] += 1

        layer.mlp.register_forward_pre_hook(count)
    inner(input_ids=IDS).logits.sum().backward()
    assert runs == [1, 1, 2]
    assert [layer.gradient_checkpointing for layer in layers(inner)] == [False, False, True]
