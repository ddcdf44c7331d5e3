"""Columns of auxiliary models are read as they were written, or computed again."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from surefoot.data.store.dataset import EncodedDataset, in_memory
from surefoot.errors import DataError
from surefoot.parallel.world import ALONE
from surefoot.run.contexts import eval_set
from surefoot.stages import DPO
from surefoot.training.precompute import PIECE, precomputation, with_items


@dataclass(frozen=True)
class Numbers:
    """A context whose outputs for an example are its first token, twice."""

    calls: list = field(default_factory=list)

    def reduce(self, role, examples, function):
        self.calls.append(len(examples))
        return np.array([[[item["input_ids"][0]] * 2] * 2 for item in examples], np.float64)


def items(count, first=0):
    return in_memory([{"input_ids": [first + i] * (i % 3 + 1)} for i in range(count)])


def opened(folder, *datasets):
    sets = [eval_set(dataset, 4) for dataset in datasets]
    return precomputation(DPO(), "model", folder, sets, ALONE)


def is_known(folder, *datasets):
    return [known is not None for known in opened(folder, *datasets).columns]


@pytest.fixture
def kept(tmp_path):
    """The file of the columns of three examples."""
    opened(tmp_path, items(3)).run(Numbers())
    (file,) = tmp_path.rglob("*.safetensors")
    return file


def test_pieces_are_read_as_they_were_written(tmp_path):
    data, context = items(PIECE + 3), Numbers()
    found = opened(tmp_path, data)
    assert [piece.num_items for piece in found.pieces] == [PIECE, 3]
    assert is_known(tmp_path, data) == [False, False]
    last = found.pieces[1]
    last.write(last.compute(DPO(), context))
    assert is_known(tmp_path, data) == [False, True]
    found = opened(tmp_path, data)
    found.run(context)
    assert context.calls == [3, PIECE]
    (store,) = with_items(data, found).stores
    assert store.features["reference"].flat.dtype == np.float32
    assert [item["reference"].tolist() for item in store] == [[i, i] for i in range(PIECE + 3)]


@pytest.mark.parametrize("size", [0, 7, -1])
def test_a_torn_piece_is_none(size, kept, tmp_path):
    kept.write_bytes(kept.read_bytes()[:size])
    assert is_known(tmp_path, items(3)) == [False]


def test_a_file_that_is_there_and_cannot_be_used_is_named(kept, tmp_path, caplog):
    """To compute it again may take hours."""
    kept.write_bytes(b"x")
    assert is_known(tmp_path, items(3)) == [False]
    assert f"{kept} cannot be used" in caplog.text
    kept.unlink()
    caplog.clear()
    assert is_known(tmp_path, items(3)) == [False] and not caplog.text


def test_a_flipped_bit_is_noticed(kept, tmp_path):
    whole = bytearray(kept.read_bytes())
    at = whole.index(np.repeat(np.arange(3, dtype=np.float32), 2).tobytes()) + 5
    whole[at] ^= 1
    kept.write_bytes(whole)
    assert is_known(tmp_path, items(3)) == [False]


def test_a_piece_of_other_items_is_none(kept, tmp_path):
    assert is_known(tmp_path, items(3)) == [True]
    assert is_known(tmp_path, items(4)) == [False]
    (piece,) = opened(tmp_path, items(4)).pieces
    kept.parent.rename(piece.folder)
    assert is_known(tmp_path, items(4)) == [False]


def test_what_cannot_be_written_is_the_cache_folders_error(tmp_path):
    found = opened(tmp_path, items(1))
    (tmp_path / "reference").write_text("")
    with pytest.raises(DataError, match=r"data\.cache_dir"):
        found.run(Numbers())


def test_every_item_has_its_columns_wherever_it_is_drawn(tmp_path):
    one, two = items(4), items(1, first=100)
    both = EncodedDataset((*one.stores, *two.stores), np.array([4, 2, 0]))
    found = opened(tmp_path, both, one, two)
    assert len(found.pieces) == 2
    found.run(Numbers())
    drawn = with_items(both, found)
    rows = [drawn[i]["reference"].tolist() for i in range(3)]
    assert rows == [[100, 100], [2, 2], [0, 0]]
    assert drawn.fingerprint == both.fingerprint
    assert drawn.lengths.tolist() == both.lengths.tolist()
