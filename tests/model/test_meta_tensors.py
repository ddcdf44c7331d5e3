"""What is found out by running a model on the meta device is the same wherever they are, and
leaves the model as it was."""

import pytest
import torch

import tiny
from surefoot.model.loading import on_meta
from surefoot.model.outputs import logprob_head_of
from zoo import architectures

READS_VALUES = ["gpt2", "gptj", "gpt_neo", "codegen", "openai-gpt", "jetmoe", "ctrl", "mixtral"]


@pytest.mark.parametrize("name", [*READS_VALUES, "gemma3n_text", "llama:tied"])
def test_the_output_head_is_replaced_or_not_whether_the_model_has_values_or_none(name):
    model = architectures.build(name)
    before = {n: (b, b.clone()) for n, b in model.named_buffers()}
    has_values = logprob_head_of(model) is not None
    for n, buffer in model.named_buffers():
        assert buffer is before[n][0] and torch.equal(buffer, before[n][1]), n
    assert all(not p.is_meta for p in model.parameters())
    assert (logprob_head_of(model.to("meta")) is not None) == has_values
    assert has_values == (name != "jetmoe")  # it splits tokens by numbers that it computes


def test_tied_tensors_are_one_meanwhile_and_afterwards():
    model = tiny.model("qwen2")
    weight = model.lm_head.weight
    with on_meta(model):
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert model.lm_head.weight.is_meta
    assert model.lm_head.weight is weight is model.model.embed_tokens.weight


def test_what_the_code_of_a_model_puts_into_itself_does_not_stay():
    class Changing(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.ones(2))
            self.plain = torch.ones(2)

    module = Changing()
    table, plain = module.table, module.plain
    with on_meta(module):
        assert module.table.is_meta and module.plain.is_meta
        module.table = module.table * 2
        module.register_buffer("longer", torch.zeros(3, device="meta"))
        module.cached = torch.zeros(3, device="meta")
    assert module.table is table and module.plain is plain
    assert not hasattr(module, "longer") and not hasattr(module, "cached")
