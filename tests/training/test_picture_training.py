"""Batches with pictures: packed rows have the values of documents alone, on any number of ranks."""

import pytest
import torch

import pictures
from surefoot.batch import IGNORE_INDEX
from surefoot.data.order.micro_batches import without_labels
from surefoot.errors import ModelError
from surefoot.model import isolation
from surefoot.model.isolation import use_packed
from surefoot.model.outputs import compute, logprob_head_of
from surefoot.model.packed_attention import MASKS
from surefoot.recipe.recipe_data import open_codec
from surefoot.run.contexts import collation_of


@pytest.fixture(scope="module", params=pictures.KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def prepared(kind, tmp_path_factory):
    """The recipe, the codec, and items with no, one and two pictures at different offsets."""
    folder = tmp_path_factory.mktemp(kind)
    base = pictures.save_model(folder / "base", kind)
    made = pictures.recipe(folder, base)
    codec = open_codec(made, base)
    return made, codec, pictures.items(codec, folder)


def alone(model, collation, item):
    """The log-probabilities of an item, by transformers' own forward pass of it alone."""
    batch = collation.batch([item])
    model.set_attn_implementation("sdpa")
    logits = model(input_ids=batch.input_ids, use_cache=False, **batch.media).logits[0]
    labels = batch.labels[0, 1:]
    at = (labels != IGNORE_INDEX).nonzero()[:, 0]
    return logits[at].log_softmax(-1).gather(1, labels[at][:, None])[:, 0]


def together(model, batch):
    return compute(model, batch, pictures.LOGPS, head=logprob_head_of(model)).logps


def gradients(model):
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("packing", [True, False])
def test_a_batch_has_the_values_and_gradients_of_its_documents_alone(kind, prepared, packing):
    made, codec, items = prepared
    collation = collation_of(made, codec)
    model = pictures.model(kind)
    expected = torch.cat([alone(model, collation, item) for item in items])
    expected.mul(expected.detach().cos()).sum().backward()
    expected_gradients = gradients(model)
    if packing:
        use_packed(model, 200, pictures.probes(made, codec))
    batch = pictures.padded(collation, packing).batch(items).located()
    values = together(model, batch)
    assert (values - expected).abs().max() <= 2e-6 * expected.abs().max()
    values.mul(values.detach().cos()).sum().backward()
    found = gradients(model)
    assert found.keys() == expected_gradients.keys()
    for name, gradient in found.items():
        bound = 1e-5 * expected_gradients[name].abs().max() + 1e-9
        assert (gradient - expected_gradients[name]).abs().max() <= bound, name


@pytest.mark.parametrize("kind", ["gemma3"], scope="module")
def test_the_causal_kernel_is_refused_where_pictures_see_themselves(kind, prepared, monkeypatch):
    made, codec, items = prepared
    probes = pictures.probes(made, codec)
    model = pictures.model(kind)
    use_packed(model, 200)
    assert model.config._attn_implementation == "surefoot_packed_sdpa"
    batch = collation_of(made, codec).batch(items).located()
    expected = torch.cat([alone(pictures.model(kind), collation_of(made, codec), i) for i in items])
    error = (together(model, batch) - expected).abs().max() / expected.abs().max()
    assert error > 1e-5, "it is wrong, and a check with text alone does not see it"
    use_packed(model, 200, probes)
    assert model.config._attn_implementation == MASKS
    monkeypatch.setattr(isolation, "MASKS", "surefoot_packed_sdpa")
    with pytest.raises(ModelError, match="other values than alone, if it has pictures"):
        use_packed(pictures.model(kind), 200, probes)


def test_a_spare_document_changes_nothing_and_its_gradients_in_the_tower_are_zero(kind, prepared):
    made, codec, items = prepared
    collation = collation_of(made, codec)
    text = [item for item in items if not len(item["media"])]
    model = pictures.model(kind)
    use_packed(model, 200, pictures.probes(made, codec))
    plain = together(model, collation.batch(text).located())
    assert collation.batch(text).media == {}
    assert collation.among(text, 2) is collation, "there is no picture on any rank"
    assert collation.among(items, 1) is collation, "there is no other rank"
    batch = collation.among(items, 2).batch(text).located()
    assert "pixel_values" in batch.media
    values = together(model, batch)
    assert torch.equal(values, plain)
    values.sum().backward()
    reached = gradients(model)
    tower = [n for n in reached if "vision" in n or "visual" in n]
    assert tower
    assert all(not reached[name].any() for name in tower)
    assert len(collation.among(items, 2).batch(items).labels[0]) == len(
        collation.batch(items).labels[0]
    )


def test_a_masked_document_has_no_label(prepared):
    _, codec, _ = prepared
    assert set(without_labels(codec.picture_probe()[0])["labels"]) == {IGNORE_INDEX}
