"""What a reference has said is read as it was written, or asked again."""

import numpy as np
import pytest
from surefoot.data.store.reference_logps_store import (
    PIECE,
    ReferenceLogpsStore,
    stores_of,
    with_reference_logps,
)

from surefoot.data.store.dataset import EncodedDataset, in_memory
from surefoot.errors import DataError


def values(count):
    return np.arange(2 * count, dtype=np.float32).reshape(count, 2)


def test_pieces_are_read_as_they_were_written(tmp_path):
    asked = ReferenceLogpsStore(tmp_path / "new" / "key", PIECE + 3)
    assert [len(piece) for piece in asked.pieces] == [PIECE, 3]
    assert [asked.read(piece) for piece in asked.pieces] == [None, None]
    last = asked.pieces[1]
    asked.write(last, values(3))
    assert asked.read(asked.pieces[0]) is None
    assert np.array_equal(asked.read(last), values(3))


@pytest.mark.parametrize("size", [0, 7, -1])
def test_a_torn_piece_is_none(size, tmp_path):
    asked = ReferenceLogpsStore(tmp_path, 3)
    (piece,) = asked.pieces
    asked.write(piece, values(3))
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:size])
    assert asked.read(piece) is None


def test_a_flipped_bit_is_noticed(tmp_path):
    asked = ReferenceLogpsStore(tmp_path, 3)
    (piece,) = asked.pieces
    asked.write(piece, values(3))
    (file,) = tmp_path.iterdir()
    whole = bytearray(file.read_bytes())
    at = whole.index(values(3).tobytes()) + 5
    whole[at] ^= 1
    file.write_bytes(whole)
    assert asked.read(piece) is None


def test_a_piece_of_other_items_is_none(tmp_path):
    asked = ReferenceLogpsStore(tmp_path, 3)
    asked.write(asked.pieces[0], values(3))
    more = ReferenceLogpsStore(tmp_path, 4)
    assert more.read(more.pieces[0]) is None


def test_what_cannot_be_written_is_the_cache_folders_error(tmp_path):
    (tmp_path / "file").write_text("")
    asked = ReferenceLogpsStore(tmp_path / "file", 1)
    with pytest.raises(DataError, match=r"data\.cache_dir"):
        asked.write(asked.pieces[0], values(1))


def test_every_item_has_its_answers_wherever_it_is_drawn():
    one = in_memory([{"input_ids": [i] * (i + 1)} for i in range(4)])
    two = in_memory([{"input_ids": [9]}])
    both = EncodedDataset((*one.stores, *two.stores), np.array([4, 2, 0]))
    said = {one.stores[0].content: values(4), two.stores[0].content: values(1) + 100}
    assert stores_of([both, one, two]) == [*one.stores, *two.stores]
    found = with_reference_logps(both, said)
    assert [item["reference"].tolist() for item in found] == [[100, 101], [4, 5], [0, 1]]
    assert found.fingerprint == both.fingerprint
    assert found.lengths.tolist() == both.lengths.tolist()
