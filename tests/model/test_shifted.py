"""Shifted sparse attention: what a loop in float64 computes, in training only, whatever is packed
beside a document."""

import math
from itertools import pairwise

import pytest
import torch

import tiny
from project import Project, assert_same, final_weights, losses
from surefoot.batch import OutputSpec
from surefoot.data.text.collation import pack
from surefoot.errors import ModelError, RecipeError
from surefoot.model import outputs
from surefoot.model.isolation import use_packed
from surefoot.model.packed_attention import Bounds, by_document, in_groups, sdpa, use_groups
from surefoot.recipe.recipe import load, read
from surefoot.run.assembly import build
from zoo import architectures

LENGTHS, GROUP = [11, 1, 6, 4], 4
VALUES = torch.tensor([0, *LENGTHS]).cumsum(0).tolist()


def reference(query, key, value, values, group):
    """[H, T, E] by the definition, one query at a time."""
    heads, length, size = query.shape
    found = torch.zeros_like(query)
    for head in range(heads):
        own = head * len(key) // heads
        shift = 0 if head < heads // 2 else group // 2
        for start, stop in pairwise(values):
            for t in range(start, stop):
                seen = [
                    s
                    for s in range(start, t + 1)
                    if (s - start + shift) // group == (t - start + shift) // group
                ]
                scores = key[own, seen] @ query[head, t] / math.sqrt(size)
                found[head, t] = scores.softmax(0) @ value[own, seen]
    assert length == values[-1]
    return found


@pytest.mark.parametrize(("heads", "keys"), [(4, 4), (4, 2), (4, 1), (6, 3)])
def test_it_is_what_the_definition_says(heads, keys):
    torch.manual_seed(0)
    shapes = [(count, VALUES[-1], 8) for count in (heads, keys, keys)]
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    attend = in_groups(by_document(sdpa))
    given = {"document_bounds": Bounds(VALUES, group=GROUP)}
    found = attend(torch.nn.Identity(), *(x[None] for x in inputs), None, **given)[0]
    expected = reference(*inputs, VALUES, GROUP)
    assert torch.allclose(found[0].transpose(0, 1), expected, rtol=1e-10, atol=1e-12)
    slope = torch.randn_like(expected)
    ours = torch.autograd.grad((found[0].transpose(0, 1) * slope).sum(), inputs)
    theirs = torch.autograd.grad((expected * slope).sum(), inputs)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-11)


def labelled(ids, lengths):
    """A packed row, trained on all tokens but the first of each document."""
    pieces = torch.split(ids, lengths)
    return pack([{"input_ids": p.tolist(), "labels": p.tolist()} for p in pieces])


def logps(model, batch):
    return outputs.compute(model, batch, OutputSpec(("logps",))).logps


def grouped(kind="llama", group=GROUP, **changes):
    model = tiny.model(kind, **changes)
    use_packed(model)
    use_groups(model, group)
    return model.train()


IDS = torch.arange(3, 25)
ROW = labelled(IDS, [22])


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "gemma2", "mixtral"])
def test_a_document_is_as_alone_whatever_is_packed_beside_it(kind):
    model = grouped(kind)
    together = logps(model, labelled(IDS, LENGTHS))
    pieces = [piece for piece in torch.split(IDS, LENGTHS) if len(piece) > 1]
    alone = torch.cat([logps(model, labelled(piece, [len(piece)])) for piece in pieces])
    assert torch.allclose(together, alone, rtol=1e-5, atol=1e-6)


def test_evaluation_has_full_attention():
    model, plain = grouped().eval(), tiny.model()
    assert torch.equal(logps(model, ROW), logps_of_plain(plain))
    assert not torch.allclose(logps(model.train(), ROW), logps(model.eval(), ROW))


def logps_of_plain(plain):
    use_packed(plain)
    return logps(plain, ROW)


def test_groups_longer_than_all_documents_are_full_attention():
    assert torch.equal(logps(grouped(group=48), ROW), logps_of_plain(tiny.model()))


def test_no_token_sees_a_later_one():
    model, other = grouped(), IDS.clone()
    other[15:] = 40
    ours, theirs = (logps(model, labelled(ids, [22])) for ids in (IDS, other))
    assert torch.equal(ours[:14], theirs[:14])
    assert not torch.equal(ours[14:], theirs[14:])


def project(folder, **sections):
    return Project(
        folder,
        model={"path": "model", "shifted_attention_group": 8},
        data={"datasets": ["sums"], "cutoff_len": 64, "packing": True},
        **sections,
    )


def test_a_run_resumes_to_the_same_bits(tmp_path):
    made = project(tmp_path, train={"max_steps": 4})
    build(load(made.recipe, ["checkpoint.save_steps=2"])).fit()
    other = f"train.output_dir={tmp_path / 'rest'}"
    build(load(made.recipe, [other]), resume=made.run / "checkpoint-2").fit()
    assert losses(tmp_path / "rest") == losses(made.run)
    assert_same(final_weights(tmp_path / "rest"), final_weights(made.run))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"data": {"datasets": ["sums"], "packing": False}},
            r"data\.packing: .* needs packed rows; set it to true",
        ),
        ({"parallel": {"tp": 2}}, r"parallel\.tp: .* needs all heads on one rank"),
        ({"stage": "dpo"}, "stage: .* needs a stage without a reference model or samples"),
        ({"model": {"path": "x", "shifted_attention_group": 7}}, "must be even and positive"),
    ],
)
def test_what_it_does_not_fit_is_refused(changes, words):
    plain = {
        "model": {"path": "x", "shifted_attention_group": 8},
        "data": {"datasets": ["sums"], "packing": True},
        "stage": "sft",
        "train": {"output_dir": "x"},
    }
    with pytest.raises(RecipeError, match=words):
        read({**plain, **changes})


def test_an_architecture_whose_attention_is_its_own_is_refused():
    model = architectures.build("bloom", attention="eager")
    use_groups(model, 8)
    with pytest.raises(ModelError, match="BloomForCausalLM cannot attend in groups: "):
        use_packed(model)
    with pytest.raises(ModelError, match="has 1 attention heads, not two halves"):
        use_groups(tiny.model(num_attention_heads=1, num_key_value_heads=1), 8)
