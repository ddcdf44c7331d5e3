"""Batches whose length the processes divide, and what sequence parallelism cannot pass on."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tiny
from surefoot.batch import IGNORE_INDEX, OutputSpec
from surefoot.data.text.collation import collate
from surefoot.errors import RecipeError
from surefoot.model import isolation, outputs
from surefoot.parallel.section import ParallelSection
from surefoot.parallel.tensor_parallel import block, widened
from surefoot.parallel.tp_plan import ModulePlan


def features(*lengths):
    return [{"input_ids": [*range(3, 3 + n)], "labels": [*range(3, 3 + n)]} for n in lengths]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.integers(1, 8), st.booleans())
def test_what_is_added_trains_nothing_and_divides(lengths, multiple, packing):
    batch = collate(features(*lengths), packing=packing)
    wide, length = widened(batch, multiple), batch.input_ids.shape[1]
    assert wide.input_ids.shape[1] % multiple == 0
    assert 0 <= wide.input_ids.shape[1] - length < multiple
    for name in ("input_ids", "labels", "position_ids"):
        assert torch.equal(getattr(wide, name)[:, :length], getattr(batch, name))
    assert (wide.labels[:, length:] == IGNORE_INDEX).all()
    assert wide.num_trained == batch.num_trained
    if packing:
        assert wide.cu_seqlens[-1] == wide.input_ids.shape[1]
        assert wide.cu_seqlens[: len(batch.cu_seqlens)].tolist() == batch.cu_seqlens.tolist()
        assert wide.cu_seqlens.dtype == torch.int32
    else:
        assert wide.num_tokens == batch.num_tokens


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_what_is_added_changes_no_log_probability(packing):
    model = tiny.model("mistral", dtype=torch.float64)
    if packing:
        isolation.use_packed(model)
    batch = collate(features(7, 6), packing=packing)
    expected = outputs.compute(model, batch, OutputSpec(()))
    found = outputs.compute(model, widened(batch, 8), OutputSpec(()))
    torch.testing.assert_close(found.logps, expected.logps, rtol=1e-12, atol=1e-12)


def test_a_layer_that_passes_on_more_than_one_sequence_is_refused():
    module = torch.nn.Identity()
    block(ModulePlan(module, "block"), None, None)
    with pytest.raises(RecipeError, match=r"sequence_parallel: Identity .* set it to false"):
        module(torch.zeros(4, 1, 2, 3))


def test_tokens_are_cut_over_tp_only():
    with pytest.raises(ValueError, match="sequence_parallel needs tp of at least 2, got 1"):
        ParallelSection(sequence_parallel=True)
