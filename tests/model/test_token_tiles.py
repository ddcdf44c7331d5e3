"""Token-wise modules in tiles: the same losses and gradients, without a row's intermediate."""

import pytest
import torch
from torch import nn

import tiny
from surefoot.methods import Full, LoRA
from surefoot.model import token_tiles
from surefoot.model.layers import recompute_activations
from surefoot.model.lora_layers import enable_fused_lora
from surefoot.model.token_tiles import tile_tokens
from surefoot.use.estimate._dry_run import LiveBytes

TILE = 16
IDS = torch.arange(2, 62).repeat(2)[:110].reshape(2, 55)  # 110 tokens: the last tile has 14


@pytest.fixture(autouse=True)
def _short_tiles(monkeypatch):
    monkeypatch.setattr(token_tiles, "TILE", TILE)


def outcome(method, policy, *, tiles, autocast=False, **changes):
    """Loss, gradients, the most bytes that were alive, and calls of the first MLP."""
    inner = tiny.model(num_hidden_layers=3, **changes)
    torch.manual_seed(1)
    model = method.apply(inner)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    enable_fused_lora(model)
    if not autocast:
        model.double()
    recompute_activations(inner, policy)
    count = tile_tokens(inner) if tiles else 0
    model.train()
    tokens = []
    mlp = inner.model.layers[0].mlp
    mlp.act_fn.register_forward_hook(lambda _, x, y: tokens.append(y.numel() // y.shape[-1]))
    own = [*model.parameters(), *model.buffers()]
    with LiveBytes(own, inner.config.vocab_size, lambda: 0) as live:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return loss, gradients, live.peak.activations, tokens, count


@pytest.mark.parametrize("policy", ["full", "offload"])
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("method", [Full(), LoRA(rank=2)], ids=["full", "lora"])
def test_losses_and_gradients_are_those_without_tiles(method, kind, policy):
    plain = outcome(method, "none", tiles=False, kind=kind)
    tiled = outcome(method, policy, tiles=True, kind=kind)
    assert tiled[4] == 3 and max(tiled[3]) == TILE
    torch.testing.assert_close(tiled[0], plain[0], rtol=1e-12, atol=0)
    assert tiled[1].keys() == plain[1].keys()
    for name, gradient in plain[1].items():
        error = (tiled[1][name] - gradient).norm() / gradient.norm()
        assert error < 1e-12, name


def test_a_module_before_a_norm_stays_whole_as_it_would_be_computed_three_times():
    model = tiny.model("gemma2")
    recompute_activations(model, "full")
    assert tile_tokens(model) == 0


def test_gradients_of_autocast_reach_the_weights():
    plain = outcome(Full(), "full", tiles=False, autocast=True)
    tiled = outcome(Full(), "full", tiles=True, autocast=True)
    for name, gradient in plain[1].items():
        assert (tiled[1][name] - gradient).norm() < 0.02 * gradient.norm(), name


def test_a_layer_takes_less_and_its_mlp_is_computed_no_more_often():
    sizes = {"intermediate_size": 512}
    whole = outcome(LoRA(rank=2), "full", tiles=False, **sizes)
    tiled = outcome(LoRA(rank=2), "full", tiles=True, **sizes)
    assert tiled[2] < whole[2] / 2
    assert sum(tiled[3]) == sum(whole[3]) == 2 * IDS.numel()


def test_only_what_computes_each_token_by_itself_is_found():
    class Shifted(nn.Module):
        def __init__(self, is_random=False):
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
            self.dropout = nn.Dropout(0.5)
            self.is_random = is_random

        def forward(self, x):
            y = self.down(self.up(x))
            return self.dropout(y) if self.is_random else y + 0.1 * x.roll(1, 1)

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Parameter(torch.ones(2, 8, 8))

        def forward(self, x):
            return x @ self.up.sum(0)

    for module in (Shifted(), Shifted(is_random=True), Experts(), nn.MultiheadAttention(8, 2)):
        assert not token_tiles._is_token_wise(module, 8)
    assert token_tiles._is_token_wise(nn.Sequential(nn.Linear(8, 9), nn.Linear(9, 8)), 8)
    model = tiny.model()
    assert tile_tokens(model) == 0  # nothing is recomputed
