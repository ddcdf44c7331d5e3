"""The first kernel of a fixed order that passes its self-check is used; a run keeps its kernel."""

import logging
import time
from itertools import pairwise

import pytest
import torch

import tiny
from surefoot.model import isolation, packed_attention, packed_kernels
from surefoot.model.packed_attention import DocumentBounds, Scoring, sdpa
from surefoot.model.packed_kernels import BY_DOCUMENT, Row, choose, flex, register, use, varlen
from surefoot.model.packed_kernels import one_call_per_document as right

CPU = torch.device("cpu")
ROW = Row(4, 2, 16, [0, 40, 47, 48, 128], CPU, torch.float32)


def test_where_there_is_nothing_to_choose_from_the_log_says_what_is_used(caplog):
    caplog.set_level(logging.INFO)
    assert choose(ROW) == BY_DOCUMENT
    assert "attention kernel: sdpa, for rows that pack several documents" in caplog.text


def test_the_first_kernel_that_passes_is_used_however_slow_it_is(caplog):
    caplog.set_level(logging.INFO)

    def slow(*row):
        time.sleep(0.01)
        return right(*row)

    assert choose(ROW, {"wrong": leaks, "slow": slow, "quick": right}) == "slow"
    (used,) = caplog.messages
    assert used.startswith("attention kernel: slow,")
    assert "which may be slower: wrong: its result differs by" in used


def test_the_order_of_preference_is_fixed():
    assert list(packed_kernels.candidates(torch.device("cuda"))) == ["varlen", "flex"]
    assert not packed_kernels.candidates(CPU)


def leaks(heads, bounds, scaling):
    """All documents as one."""
    return right(heads, DocumentBounds([0, bounds.values[-1]]), scaling)


def sees_all(heads, bounds, scaling):
    """Responses that share a prompt as one."""
    return right(heads, DocumentBounds(bounds.values), scaling)


def fails(*_row):
    raise RuntimeError("no kernel image is available\nfor this device")


def nothing(*row):
    return right(*row) * float("nan")


class Restless:
    """Sums that come out in another order each time."""

    count = 0

    def __call__(self, *row):
        self.count += 1
        return right(*row) * (1 + self.count * 1e-7)


@pytest.mark.parametrize(
    ("kernel", "why"),
    [
        (leaks, "its result differs by"),
        (sees_all, "its result of responses that share a prompt differs by"),
        (fails, "it fails (no kernel image is available"),
        (nothing, "its result differs by nan"),
        (Restless(), "its bits differ from run to run (train.deterministic)"),
    ],
)
def test_a_kernel_that_cannot_be_trusted_is_dropped_with_its_reason(kernel, why, caplog):
    caplog.set_level(logging.INFO)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert choose(ROW, {"new": kernel}) == BY_DOCUMENT
    finally:
        torch.use_deterministic_algorithms(False)
    assert f"may be slower: new: {why}" in caplog.text


def test_varlen_is_dropped_where_it_does_not_run():
    assert choose(ROW, {"varlen": varlen}) == BY_DOCUMENT


@pytest.mark.parametrize("knows_gqa", [True, False])
def test_varlen_is_called_as_this_version_of_torch_has_it(knows_gqa, monkeypatch):
    """torch 2.11 has no ``enable_gqa``."""

    def run(q, k, v, queries, keys, *longest, scale, window_size):
        assert window_size == (-1, 0)
        assert longest == tuple(int(bounds.diff().max()) for bounds in (queries, keys))
        outputs = []
        for at, at_keys in zip(*(pairwise(b.tolist()) for b in (queries, keys)), strict=True):
            parts = [(q, at), (k, at_keys), (v, at_keys)]
            heads = [each[slice(*place)].transpose(0, 1)[None] for each, place in parts]
            outputs.append(sdpa(heads, Scoring(scale, 0.0, None, None)))
        return torch.cat(outputs, dim=2)[0].transpose(0, 1)

    def newer(*arguments, scale, window_size, enable_gqa=False):
        assert enable_gqa
        return run(*arguments, scale=scale, window_size=window_size)

    monkeypatch.setattr(packed_kernels, "varlen_attn", newer if knows_gqa else run)
    assert choose(ROW, {"varlen": varlen}) == "varlen"


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    "branches", [None, [(20, 5, 6, 9), (3, 4, 0, 0), (1, 0, 0, 0), (80, 0, 0, 0)]]
)
def test_blocks_are_documents_and_responses(branches):
    inputs = ROW.inputs()
    expected, found = (k(inputs, DocumentBounds(ROW.bounds, branches), 0.3) for k in (right, flex))
    torch.testing.assert_close(found, expected)


def test_a_model_gives_the_same_through_a_kernel_and_windows_go_by_document(monkeypatch):
    calls = []

    def counted(*row):
        calls.append(row)
        return right(*row)

    register("counted", counted)
    bounds = torch.tensor([0, 11, 24], dtype=torch.int32)
    ids = torch.arange(24)[None]
    positions = torch.cat([torch.arange(11), torch.arange(13)])[None]
    for kind, layers in (("llama", 3), ("mistral", 0)):
        model = tiny.model(kind, **({"sliding_window": 5} if kind == "mistral" else {}))
        isolation.use_packed(model)
        asked = {"input_ids": ids, "position_ids": positions, "use_cache": False}
        expected = model(**asked, **packed_attention.packed_arguments(model, bounds)).logits
        model.set_attn_implementation(packed_attention.PREFIX + "counted")
        calls.clear()
        found = model(**asked, **packed_attention.packed_arguments(model, bounds)).logits
        torch.testing.assert_close(found, expected)
        assert len(calls) == layers


def test_a_kernel_that_is_not_here_any_more_gives_way_with_a_warning(caplog):
    model = tiny.model()
    isolation.use_packed(model)
    assert use(model, "varlen") == BY_DOCUMENT
    assert "varlen, used by the checkpoint, is not available on cpu" in caplog.text
