import pytest
import torch
from safetensors.torch import save_file

from surefoot.checkpoint.disk.tensorfile import open_path
from surefoot.errors import CheckpointError
from surefoot.plugins.mindspore.opening import infer_strategy

WQ, WO, NORM = (f"model.layers.0.attention.{n}.weight" for n in ("wq", "wo", "norm"))
EMBEDDING = "model.tok_embeddings.embedding_weight"


def ranks(tmp_path, *tensors):
    for i, own in enumerate(tensors):
        save_file({name: t.contiguous() for name, t in own.items()}, tmp_path / f"{i}.safetensors")
    return [open_path(tmp_path / f"{i}.safetensors") for i in range(len(tensors))]


def shapes(whole):
    return {name: tuple(tensor.shape) for name, tensor in whole.items()}


def boxes(strategy, name, whole, count):
    layouts, _ = strategy.of_rank(0)
    return [layouts[name].box(tuple(whole.shape), device).start for device in range(count)]


def test_a_projection_back_tells_how_many_ranks_share_a_model(tmp_path):
    whole = {WQ: torch.randn(8, 4), WO: torch.randn(4, 8)}
    cut = [
        {WQ: whole[WQ][4 * mp : 4 * mp + 4], WO: whole[WO][:, 4 * mp : 4 * mp + 4]}
        for _ in range(2)
        for mp in range(2)
    ]
    found = infer_strategy(ranks(tmp_path, *cut), shapes(whole), tmp_path)
    assert boxes(found, WQ, whole[WQ], 4) == [(0, 0), (4, 0), (0, 0), (4, 0)]


def test_two_ways_that_give_the_same_files_are_refused(tmp_path):
    """Over four ranks by the optimizer, or over two by the model and two by the optimizer."""
    whole = {WO: torch.randn(4, 8), EMBEDDING: torch.randn(8, 4)}
    cut = [
        {WO: whole[WO][:, 4 * (r % 2) : 4 * (r % 2) + 4], EMBEDDING: whole[EMBEDDING][2 * r :][:2]}
        for r in range(4)
    ]
    with pytest.raises(CheckpointError, match="can be sharded over 4 devices in several ways"):
        infer_strategy(ranks(tmp_path, *cut), shapes(whole), tmp_path)


def test_norms_that_start_as_ones_are_not_taken_for_cut_ones(tmp_path):
    whole = {NORM: torch.ones(16), WQ: torch.randn(8, 4), WO: torch.randn(4, 8)}
    cut = [
        {NORM: whole[NORM], WQ: whole[WQ][4 * i : 4 * i + 4], WO: whole[WO][:, 4 * i : 4 * i + 4]}
        for i in range(2)
    ]
    found = infer_strategy(ranks(tmp_path, *cut), shapes(whole), tmp_path)
    assert boxes(found, NORM, whole[NORM], 2) == [(0,), (0,)]


def test_shapes_that_nothing_gives_are_refused(tmp_path):
    files = ranks(tmp_path, {WQ: torch.randn(3, 4)}, {WQ: torch.randn(3, 4)})
    with pytest.raises(CheckpointError, match="no layout on 2 devices gives these shapes"):
        infer_strategy(files, {WQ: (8, 4)}, tmp_path)


def test_another_model_is_refused(tmp_path):
    files = ranks(tmp_path, {"a": torch.randn(3, 4)}, {"a": torch.randn(3, 4)})
    with pytest.raises(CheckpointError, match="is it another model"):
        infer_strategy(files, {WQ: (8, 4)}, tmp_path)
