"""No example sees another: packed rows give the logits and gradients of one-by-one runs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from surefoot.errors import ModelError
from surefoot.model.isolation import packed_meanwhile, use_packed
from surefoot.model.packed_attention import packed_arguments, uses_document_attention
from zoo import architectures

CASES = [
    ("llama", "sdpa"),
    ("llama", "eager"),
    ("qwen2", "sdpa"),
    ("qwen3", "sdpa"),
    ("mistral", "sdpa"),
    ("mistral", "eager"),
    ("gemma2", "eager"),
]


def one_by_one(model, documents):
    return [model(input_ids=d[None], use_cache=False).logits[0] for d in documents]


def packed(model, documents):
    bounds = torch.tensor([0, *torch.tensor([len(d) for d in documents]).cumsum(0)]).int()
    positions = torch.cat([torch.arange(len(d)) for d in documents])[None]
    arguments = packed_arguments(model, bounds)
    row = torch.cat(documents)[None]
    given = {"input_ids": row, "position_ids": positions, "use_cache": False, **arguments}
    logits = model(**given).logits[0]
    return logits.split([len(d) for d in documents])


def gradients(model, logits):
    model.zero_grad()
    sum(part.log_softmax(-1)[:, 3].sum() for part in logits).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize(("kind", "attention"), CASES)
def test_a_packed_row_gives_the_logits_and_gradients_of_its_documents_alone(kind, attention):
    generator = torch.Generator().manual_seed(1)
    documents = [torch.randint(3, 64, (n,), generator=generator) for n in (5, 1, 9, 12)]
    alone = tiny.model(kind, attention=attention, dtype=torch.float64)
    together = tiny.model(kind, attention=attention, dtype=torch.float64)
    use_packed(together)
    expected, found = one_by_one(alone, documents), packed(together, documents)
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-6, atol=1e-6)  # eager softmax is in float32
    want, have = gradients(alone, expected), gradients(together, found)
    for name in want:
        torch.testing.assert_close(have[name], want[name], rtol=1e-5, atol=1e-5, msg=name)


@settings(deadline=None, max_examples=15)
@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=6), changed=st.data())
def test_changing_one_document_changes_no_other(lengths, changed):
    model = tiny.model("llama")
    use_packed(model)
    documents = [torch.arange(n) % 50 + 3 for n in lengths]
    which = changed.draw(st.integers(0, len(lengths) - 1))
    with torch.no_grad():
        before = packed(model, documents)
        documents[which] = (documents[which] + 7) % 64
        after = packed(model, documents)
    for i, (a, b) in enumerate(zip(before, after, strict=True)):
        assert torch.equal(a, b) == (i != which)


def test_weights_that_have_diverged_are_not_taken_for_a_leak():
    model = tiny.model()
    with torch.no_grad():
        model.lm_head.weight[0] = float("nan")
    with pytest.raises(ModelError, match="NaN or infinite values: its weights have diverged"):
        use_packed(model)


LENGTHS = (5, 1, 30, 12)  # beyond every window and chunk
BY_DOCUMENT = ["gpt_oss", "mistral", "cohere2", "afmoe", "gpt2"]
BY_MASK = ["qwen2_moe:window", "phimoe:window", "llama4_text", "doge:window", "stablelm"]
BY_MASK += ["nemotron", "falcon", "xglm"]


def drawn(lengths):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 64, (n,), generator=generator) for n in lengths]


@pytest.mark.parametrize("name", [*BY_DOCUMENT, *BY_MASK])
def test_documents_beyond_every_window_have_the_logits_of_padded_rows(name):
    model, documents = architectures.build(name), drawn(LENGTHS)
    with torch.no_grad():
        expected = one_by_one(model, documents)
        use_packed(model, max(LENGTHS))
        found = packed(model, documents)
    assert uses_document_attention(model) == (name in BY_DOCUMENT)
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5)


def test_a_window_that_no_document_of_the_run_exceeds_costs_nothing():
    model = architectures.build("qwen2_moe:window", sliding_window=100)
    assert use_packed(model, max(LENGTHS))
    assert uses_document_attention(model)


@pytest.mark.parametrize("name", ["gpt_neo", "mpt", "bloom", "openai-gpt", "falcon:alibi", "rwkv"])
def test_what_cannot_be_proven_is_refused_and_the_model_stays_as_it_was(name):
    model, row = architectures.build(name), torch.arange(20)[None]
    with torch.no_grad():
        before = model(input_ids=row, use_cache=False).logits
        with (
            pytest.raises(ModelError, match=r"cannot train on packed rows: .*data\.packing: false"),
            packed_meanwhile(model, 30),
        ):
            pass
        assert torch.equal(model(input_ids=row, use_cache=False).logits, before)


def test_gradients_reach_attention_sinks_through_packed_rows():
    model, documents = architectures.build("gpt_oss"), drawn((5, 9))
    want = gradients(model, one_by_one(model, documents))
    use_packed(model, 9)
    have = gradients(model, packed(model, documents))
    for name in want:
        torch.testing.assert_close(have[name], want[name], rtol=1e-4, atol=1e-5, msg=name)
    assert any("sinks" in name and gradient.any() for name, gradient in have.items())
