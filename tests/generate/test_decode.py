"""Text while it comes: the pieces are the whole, and no character is cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from surefoot.generate.responses import HOLE, TextStream, decoder

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_level():
    """A tokenizer with one token per byte."""
    rust = Tokenizer(models.BPE({letter: i for i, letter in enumerate(ALPHABET)}, []))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    rust.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=rust)


def words():
    """A tokenizer whose words carry the space before them, and decoding strips the first one."""
    vocabulary = {word: i for i, word in enumerate(["▁a", "▁b", "c", "▁", "<unk>"])}
    rust = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    rust.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=rust, unk_token="<unk>")


BYTES, WORDS = byte_level(), words()


def pieces_of(tokenizer, ids):
    stream = TextStream(decoder(tokenizer))
    return [stream.push(i) for i in ids] + [stream.end()]


@given(st.text())
def test_the_pieces_of_a_text_are_the_text(text):
    pieces = pieces_of(BYTES, BYTES(text)["input_ids"])
    assert "".join(pieces) == text


@given(st.lists(st.integers(0, 255)))
def test_whatever_the_model_writes_is_shown_in_the_end(ids):
    assert "".join(pieces_of(BYTES, ids)) == BYTES.decode(ids)


@pytest.mark.parametrize("text", ["é", "中文", "🦶🏽 ok", "a\u0301"])
def test_no_piece_holds_half_a_character(text):
    ids = BYTES(text)["input_ids"]
    assert len(ids) > len(text) - 1
    assert HOLE not in "".join(pieces_of(BYTES, ids))
    assert pieces_of(BYTES, ids)[0] == ("a" if text[0] == "a" else "")


def test_a_character_that_never_becomes_whole_is_shown_at_the_end():
    first, *_ = BYTES("é")["input_ids"]
    stream = TextStream(decoder(BYTES))
    assert (stream.push(first), stream.end(), stream.end()) == ("", HOLE, "")


@given(st.lists(st.integers(0, 3), max_size=12))
def test_spaces_between_words_are_kept(ids):
    assert "".join(pieces_of(WORDS, ids)) == WORDS.decode(ids)


def test_special_tokens_are_shown_for_what_they_are():
    tokenizer = byte_level()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool>"]})
    ids = tokenizer("a<tool>b")["input_ids"]
    assert "".join(pieces_of(tokenizer, ids)) == "a<tool>b"
