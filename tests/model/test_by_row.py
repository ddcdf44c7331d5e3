"""Adapters by row, beside merged weights in float64 and PEFT's own switching."""

import copy

import peft
import pytest
import torch
from torch import nn

from surefoot.model.lora_layers import AdaptersByRow, can_be_by_row
from tiny import model

NAMES = {
    "one": {"r": 1, "lora_alpha": 1},
    "two": {"r": 2, "target_modules": ["q_proj", "down_proj"]},
}
NAMES |= {"eight": {"r": 8, "lora_alpha": 5}, "wide": {"r": 64, "use_rslora": True}}
IDS = torch.randint(64, (13, 5), generator=torch.Generator().manual_seed(0))


def wrapped(names, dtype=torch.float32, **more):
    """PEFT's model with a random adapter for each name."""
    found = model(intermediate_size=64, dtype=dtype)
    for seed, name in enumerate(names):
        torch.manual_seed(seed)
        settings = {"target_modules": "all-linear", **NAMES.get(name, {}), **more}
        config = peft.LoraConfig(**settings, init_lora_weights=False, task_type="CAUSAL_LM")
        if isinstance(found, peft.PeftModel):
            found.add_adapter(name, config)
        else:
            found = peft.get_peft_model(found, config, adapter_name=name)
    return found.eval()


@torch.no_grad()
def by_row(network, names, ids):
    """The logits of rows with these adapters, in one pass."""
    rows = AdaptersByRow()
    rows.attach(network)
    with network.disable_adapter(), rows.on(names):
        return network(ids, use_cache=False).logits


@torch.no_grad()
def switched(network, name, ids):
    if name is None:
        with network.disable_adapter():
            return network(ids, use_cache=False).logits
    network.set_adapter(name)
    return network(ids, use_cache=False).logits


def merged(network, name, ids):
    """Of a copy in float64 whose weights contain the adapter."""
    copied = copy.deepcopy(network).double()
    if name is None:
        return switched(copied, None, ids)
    copied.set_adapter(name)
    whole = copied.merge_and_unload(adapter_names=[name])
    with torch.no_grad():
        return whole(ids, use_cache=False).logits


ROWS = ["one", None, "eight", "one", "two", "wide", None, "eight", "one", "one", "one", None, "two"]


def test_each_row_has_the_logits_of_the_base_with_its_adapter_merged():
    network = wrapped(NAMES)
    found = by_row(network, ROWS, IDS)
    for name in {None, *NAMES}:
        places = [place for place, other in enumerate(ROWS) if other == name]
        expected = merged(network, name, IDS[places])
        assert torch.allclose(found[places].double(), expected, atol=2e-6, rtol=0)
    assert not torch.allclose(found, switched(network, None, IDS), atol=1e-3)


@pytest.mark.parametrize(("name", "threads"), [*((name, 1) for name in (None, *NAMES)), ("two", 2)])
def test_a_row_has_the_same_logits_whatever_is_beside_it(name, threads):
    """Up to roundings, which depend on the number of rows on some processors."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        network = wrapped(NAMES)
        ids = IDS[:, :1]
        alone = by_row(network, [name] * 4, ids[:4])[0]
        for seed in range(6):
            dice = torch.Generator().manual_seed(seed)
            order = torch.randint(5, (8 + 4 * (seed % 2),), generator=dice).tolist()
            names = [[None, *NAMES][i] for i in order]
            place = seed % len(names)
            names[place] = name
            asked = torch.randint(64, (len(names), 1), generator=dice)
            asked[place] = ids[0]
            found = by_row(network, names, asked)[place]
            assert torch.allclose(found, alone, atol=1e-6, rtol=0), names
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_computed_as_peft_computes_an_active_adapter(dtype):
    network = wrapped(NAMES, dtype)
    ids = IDS[:8, :1]
    for name in [None, *NAMES]:
        expected = switched(network, name, ids)
        assert torch.equal(by_row(network, [name] * 8, ids), expected)
        half = by_row(network, [name, None] * 4, ids)
        if dtype == torch.float32:
            assert torch.allclose(half[::2], expected[::2], atol=1e-6, rtol=0)


@pytest.mark.parametrize(("invariant", "expected"), [(False, {3, 1}), (True, {4})])
def test_rows_of_an_adapter_are_computed_in_multiples_of_4_if_bits_matter(invariant, expected):
    network, counts = wrapped(["one", "eight"]), set()
    for layer in network.modules():
        if isinstance(layer, peft.tuners.lora.Linear):
            for matrix in layer.lora_A.values():
                matrix.register_forward_hook(lambda _, given, __: counts.add(len(given[0])))
    rows = AdaptersByRow(batch_invariant=invariant)
    rows.attach(network)
    with torch.no_grad(), network.disable_adapter(), rows.on(["one", "eight", "one", None, "one"]):
        network(IDS[:5, :1], use_cache=False)
    assert counts == expected


@pytest.mark.parametrize(
    ("settings", "is_possible"),
    [
        ({}, True),
        ({"use_rslora": True}, True),
        ({"use_dora": True}, False),
        ({"target_modules": ["q_proj", "embed_tokens"]}, False),
    ],
)
def test_only_plain_products_of_linear_layers_can_be_by_row(settings, is_possible):
    network = wrapped(["plain"])
    config = {"target_modules": "all-linear", "init_lora_weights": False, **settings}
    network.add_adapter("asked", peft.LoraConfig(**config, task_type="CAUSAL_LM"))
    assert can_be_by_row(network, "asked") == is_possible
    assert can_be_by_row(network, "plain")


def test_an_adapter_of_a_parameter_cannot_be_by_row():
    network = model("qwen3_moe")
    target = "mlp.experts.gate_up_proj"
    config = peft.LoraConfig(target_modules=["q_proj"], target_parameters=[target])
    assert not can_be_by_row(peft.get_peft_model(network, config, adapter_name="x"), "x")


def test_a_layer_that_gets_other_rows_than_the_batch_has_is_an_error():
    class Expert(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x):
            return self.inner(x[:3])

    config = peft.LoraConfig(target_modules=["inner"], init_lora_weights=False)
    network = peft.get_peft_model(Expert(), config, adapter_name="x").eval()
    rows = AdaptersByRow()
    rows.attach(network)
    with (
        network.disable_adapter(),
        rows.on(["x", None, "x", "x"]),
        pytest.raises(ValueError, match="3 rows, where the batch has 4"),
    ):
        network(torch.zeros(4, 8))
    with network.disable_adapter():
        network(torch.zeros(4, 8))
