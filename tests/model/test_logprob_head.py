"""A model whose head is asked for log-probabilities learns what it would learn from logits."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from test_outputs import LABELS, ROWS, flat, padded
from torch import nn

import mixtures
import tiny
from surefoot.batch import OutputSpec
from surefoot.methods import METHODS
from surefoot.model import outputs
from surefoot.model.isolation import use_packed
from surefoot.model.outputs import logprob_head_of
from zoo import architectures

KINDS = [*tiny.KINDS, *tiny.MORE]


def learnt(model, batch, needs, head, smoothing):
    found = outputs.compute(model, batch, OutputSpec(needs, smoothing=smoothing), head=head)
    model.zero_grad()
    value = found.smoothed if smoothing else found.total
    if "logps" in needs:
        value = value + found.logps.sin().sum()
    if "entropies" in needs:
        value = value + found.entropies.sum()
    value.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return found, gradients


@pytest.mark.parametrize("smoothing", [pytest.param(0.0, marks=pytest.mark.proof), 0.2])
@pytest.mark.parametrize("needs", [("total",), ("logps",), ("logps", "entropies", "predictions")])
@pytest.mark.parametrize("make", [padded, flat])
@pytest.mark.parametrize("kind", KINDS)
def test_an_asked_head_gives_the_outputs_and_gradients_of_logits(kind, make, needs, smoothing):
    # some of transformers' kernels know no float64: eager masks, grouped products of experts
    in_single = kind in ("gemma2", "mixtral", "qwen3_moe")
    model = tiny.model(kind, dtype=torch.float32 if in_single else torch.float64)
    if make is flat:
        use_packed(model)
    batch, head = make(ROWS, LABELS), logprob_head_of(model)
    assert head is not None
    ours, our_gradients = learnt(model, batch, needs, head, smoothing)
    theirs, their_gradients = learnt(model, batch, needs, None, smoothing)
    torch.testing.assert_close(ours.total, theirs.total)
    torch.testing.assert_close(ours.smoothed, theirs.smoothed)
    assert our_gradients.keys() == their_gradients.keys()
    torch.testing.assert_close(our_gradients, their_gradients)
    if "logps" in needs:
        torch.testing.assert_close(ours.logps, theirs.logps)
    if "predictions" in needs:
        assert torch.equal(ours.predictions, theirs.predictions)


def test_a_model_that_caps_its_logits_speaks_as_before_afterwards():
    model = tiny.model("gemma2", final_logit_softcapping=2.0)
    ids = torch.tensor([[3, 4, 5]])
    before = model(input_ids=ids).logits
    head = logprob_head_of(model)
    assert head.softcap == 2.0
    outputs.compute(model, padded(ROWS, LABELS), OutputSpec(("total",)), head=head)
    assert torch.equal(model(input_ids=ids).logits, before)
    assert before.abs().max() <= 2.0


def test_a_model_that_does_more_to_its_logits_keeps_them():
    class Scaling(type(tiny.model())):
        def forward(self, *args, **kwargs):
            found = super().forward(*args, **kwargs)
            found.logits = found.logits * 0.5
            return found

    model = tiny.model()
    model.__class__ = Scaling
    assert logprob_head_of(model) is None


def test_a_model_that_takes_nothing_but_tokens_keeps_its_logits():
    class Strict(type(tiny.model())):
        def forward(self, input_ids, use_cache=None):
            return super().forward(input_ids=input_ids, use_cache=use_cache)

    model = tiny.model()
    model.__class__ = Strict
    assert logprob_head_of(model) is None
    assert model(torch.tensor([[1]])).logits.shape == (1, 1, 64)


def test_a_head_under_an_adapter_keeps_its_logits():
    model = tiny.model()
    get_peft_model(model, LoraConfig(target_modules=["lm_head"], task_type="CAUSAL_LM"))
    assert logprob_head_of(model) is None


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_an_adapter_of_fused_experts_leaves_the_head_that_computes_in_chunks(kind):
    model = mixtures.model(kind, vocab_size=71)
    adapted = METHODS["lora"](rank=2).apply(model)
    layers = [each for each in adapted.modules() if isinstance(each, BaseTunerLayer)]
    assert any(isinstance(layer, ParamWrapper) for layer in layers)
    head = logprob_head_of(adapted.get_base_model())
    assert head is not None
    assert not any(layer.disable_adapters for layer in layers)
    spec, batch = OutputSpec(("logps",)), padded(ROWS, LABELS)
    ours, theirs = (outputs.compute(adapted, batch, spec, head=each) for each in (head, None))
    torch.testing.assert_close(ours.logps, theirs.logps)


def test_why_a_head_computes_full_logits_is_said_at_every_opening(caplog):
    model = architectures.build("granite")
    for _ in range(2):
        assert logprob_head_of(model) is None
    why = "the model changes the logits after its output head"
    line = "GraniteForCausalLM: the output head computes full logits, which takes more time and "
    assert caplog.messages == [f"{line}memory: {why}"] * 2
    assert why in str(outputs.no_distribution(model))


def test_code_that_fails_on_the_meta_device_is_named_as_such():
    class Reading(type(tiny.model())):
        def forward(self, *args, **kwargs):
            raise RuntimeError("unsupported scalarType")

    model = tiny.model()
    model.__class__ = Reading
    why = outputs.why_full_logits(model)
    assert why.startswith("whether the model changes logits after its output head is not known")
    assert why.endswith("its code fails on the meta device (RuntimeError: unsupported scalarType)")


def test_a_model_without_memory_can_be_asked_too():
    with torch.device("meta"):
        model = tiny.model("qwen3")
    assert isinstance(logprob_head_of(model).linear, nn.Linear)


def test_a_failing_model_gets_its_head_back():
    model = tiny.model()
    head = logprob_head_of(model)
    with pytest.raises(IndexError):
        outputs.compute(model, padded([[10_000] * 3], [[1] * 3]), OutputSpec(("total",)), head=head)
    assert model(input_ids=torch.tensor([[1]])).logits.shape == (1, 1, 64)
