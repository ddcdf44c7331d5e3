"""oneDNN's products, beside float64 and beside themselves."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from surefoot.generate.onednn import OneDnnLinear, onednn_products, pack_weights
from tiny import model

SHAPES = [(256, 256), (704, 256), (256, 704), (97, 32), (1, 64), (64, 33)]


@torch.no_grad()
def logits(network, ids):
    return network(ids, use_cache=False).logits


def test_a_packed_model_has_the_logits_of_the_model_in_steps_and_prompts():
    plain = model(intermediate_size=64)
    packed = copy.deepcopy(plain)
    size = sum(one.weight.nbytes for one in plain.modules() if isinstance(one, nn.Linear))
    assert pack_weights(packed) == size > 0
    ids = torch.arange(12).reshape(12, 1)
    expected = logits(copy.deepcopy(plain).double(), ids)
    found = logits(packed, ids)
    assert torch.allclose(found.double(), expected, atol=1e-6, rtol=0)
    prompts = torch.arange(32).reshape(2, 16)
    expected = logits(copy.deepcopy(plain).double(), prompts)
    assert torch.allclose(logits(packed, prompts).double(), expected, atol=1e-6, rtol=0)
    assert packed.state_dict().keys() == plain.state_dict().keys()


@pytest.mark.parametrize("threads", [1, 2, pytest.param(4, marks=pytest.mark.proof)])
@torch.no_grad()
def test_a_row_of_a_product_is_that_of_float64_whatever_is_beside_it(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for seed, (rows, columns) in enumerate(SHAPES):
            torch.manual_seed(seed)
            layer = nn.Linear(columns, rows, bias=bool(seed % 2))
            exact = copy.deepcopy(layer).double()
            pack_weights(layer)
            for length, counts in ((1, (*range(4, 33, 4), 64, 96)), (16, (1, 2, 3, 17, 50))):
                x = torch.randn(96, length, columns)
                expected = exact(x.double())
                for count in counts:
                    places = torch.randperm(96)[:count]
                    found = layer(x[places]).double()
                    assert torch.allclose(found, expected[places], atol=1e-5, rtol=0)
    finally:
        torch.set_num_threads(before)


@torch.no_grad()
def test_weights_that_have_no_room_beside_themselves_give_the_same_products(caplog):
    for rows, columns in SHAPES:
        layer = nn.Linear(columns, rows)
        other = copy.deepcopy(layer)
        size = layer.weight.nbytes
        assert (pack_weights(layer, 2 * size), pack_weights(other, 2 * size - 1)) == (size, 0)
        assert other.packed is None
        x = torch.randn(8, 1, columns)
        assert torch.allclose(layer(x), other(x), atol=1e-5, rtol=0)
    assert "is slower" in caplog.text


@pytest.mark.parametrize("invariant", [False, True])
def test_packing_changes_the_layout_of_wide_layers_but_not_of_embeddings(invariant):
    network = model("qwen2", intermediate_size=64)
    before = {name: weight.clone() for name, weight in network.named_parameters()}
    pack_weights(network, batch_invariant=invariant)
    layer = network.model.layers[0].mlp
    assert layer.gate_proj.weight.is_contiguous() == invariant
    assert layer.down_proj.weight.is_contiguous()
    assert network.lm_head.weight is network.model.embed_tokens.weight
    assert network.lm_head.weight.is_contiguous()
    for name, weight in network.named_parameters():
        assert torch.equal(weight, before[name])


def test_only_plain_layers_in_float32_are_packed():
    class Own(nn.Linear):
        pass

    layers = nn.ModuleList([nn.Linear(4, 4, dtype=torch.bfloat16), Own(4, 4), nn.Embedding(4, 4)])
    assert pack_weights(layers) == 0
    assert not any(isinstance(one, OneDnnLinear) for one in layers)


@torch.no_grad()
def test_in_a_block_steps_are_onednns_and_afterwards_nothing_is_left():
    network = model(intermediate_size=64)
    ids = torch.arange(12).reshape(12, 1)
    expected, before = logits(network, ids), {id(one): dict(vars(one)) for one in network.modules()}
    with onednn_products(network):
        assert torch.allclose(logits(network, ids), expected, atol=1e-5, rtol=0)
        assert any(isinstance(one, OneDnnLinear) for one in network.modules())
    assert torch.equal(logits(network, ids), expected)
    assert {id(one): dict(vars(one)) for one in network.modules()} == before
    with pytest.raises(KeyboardInterrupt), onednn_products(network):
        raise KeyboardInterrupt
    assert not any(isinstance(one, OneDnnLinear) for one in network.modules())


def test_gradients_and_other_dtypes_are_those_of_torchs_own_product():
    layer, x = nn.Linear(16, 8), torch.randn(4, 1, 16)
    layer(x).sum().backward()
    expected, layer.weight.grad = layer.weight.grad, None
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        rounded = layer(x)
    with onednn_products(layer):
        layer(x).sum().backward()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(layer(x), rounded)
    assert torch.equal(layer.weight.grad, expected)


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


class Products(TorchDispatchMode):
    """Counts oneDNN's."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.mkldnn._linear_pointwise.default
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("packs", [False, True])
@torch.no_grad()
def test_products_of_one_or_two_rows_are_torchs(packs):
    layer = nn.Linear(64, 32)
    pack_weights(layer, None if packs else 0)
    for shape, count in (
        ((1, 1), 0),
        ((2, 1), 0),
        ((1, 2), 0),
        ((3, 1), 1),
        ((1, 3), 1),
        ((2, 2), 1),
    ):
        x = torch.randn(*shape, 64)
        with Products() as products:
            found = layer(x)
        assert products.count == count, shape
        expected = nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double())
        assert torch.allclose(found.double(), expected, atol=1e-5, rtol=0)


@torch.no_grad()
def test_a_sharded_model_has_the_same_products(mesh):
    whole = model(hidden_size=128, intermediate_size=256)
    sharded = copy.deepcopy(whole)
    for layer in sharded.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    ids, counts = torch.randint(64, (8, 1)), []
    with onednn_products(whole), onednn_products(sharded):
        for network in (whole, sharded):
            with Products() as products:
                logits(network, ids)
            counts.append(products.count)
        assert torch.equal(logits(sharded, ids), logits(whole, ids))
    assert counts == [7 * len(whole.model.layers) + 1] * 2
