"""Text to ids: positions, joints between texts, and words that must stay words."""

import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers.normalizers import NFC

import tiny_tokenizers
from each import some
from surefoot.data.text._tokenization import (
    _INERT,
    CLOSE,
    OPEN,
    RenderedText,
    Tokenization,
    token_aligner,
)
from surefoot.errors import TemplateError

KINDS = pytest.mark.parametrize("kind", tiny_tokenizers.KINDS)
TEXTS = st.text("ab1 \n\t'é🙂<|>_", max_size=20)
_MADE = {}


def made(kind):
    if kind not in _MADE:
        tokenizer = tiny_tokenizers.tokenizer(kind)
        _MADE[kind] = tokenizer, Tokenization(tokenizer, tiny_tokenizers.CONTROL)
    return _MADE[kind]


@KINDS
def test_ids_are_the_tokenizer_s_without_what_it_adds(kind):
    tokenizer, tokenization = made(kind)
    texts = ["", "Hello there", "<|im_start|>user\n\n x<|im_end|>", "é🙂"]
    found = [tokens.ids for tokens in tokenization.encode([RenderedText(text) for text in texts])]
    assert found == tokenizer(texts, add_special_tokens=False)["input_ids"]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text("aé1 e\u0301\u212b한\u1112\u1161\u11ab你🙂\n", max_size=9), max_size=5))
def test_ids_are_the_same_where_nfc_is_left_out(texts):
    tokenizer, tokenization = made("qwen")
    assert tokenization._unnormalized is not None
    found = tokenization.encode([RenderedText(f"<|im_start|>{text}") for text in texts])
    every = [f"<|im_start|>{text}" for text in texts]
    assert [t.ids for t in found] == [tokenizer.encode(t, add_special_tokens=False) for t in every]


def test_nfc_is_left_out_for_characters_that_it_never_touches():
    every = [c for c in map(chr, range(0x110000)) if _INERT.fullmatch(c)]
    decomposed = (unicodedata.decomposition(chr(i)).split() for i in range(0x110000))
    pairs = [parts for parts in decomposed if len(parts) == 2 and not parts[0].startswith("<")]
    joined = {chr(int(second, 16)) for _, second in pairs}
    jamo = set(map(chr, range(0x1161, 0x11C3)))
    assert not set(every) & (joined | jamo)
    assert not any(unicodedata.combining(c) for c in every)
    assert NFC().normalize_str("".join(every)) == "".join(every)


def test_nfc_is_not_left_out_where_an_added_token_would_change():
    tokenizer = tiny_tokenizers.tokenizer("qwen")
    tokenizer.add_tokens([AddedToken("e\u0301<>", normalized=True)])
    assert Tokenization(tokenizer, tiny_tokenizers.CONTROL)._unnormalized is None


def test_a_position_is_a_number_of_tokens_or_inside_one():
    _, tokenization = made("qwen")
    text = "<|im_start|>é x"
    (tokens,) = tokenization.encode([RenderedText(text)])
    assert tokens.index(0) == 0
    assert tokens.index(len("<|im_start|>")) == 1
    assert tokens.index(3) is None
    assert tokens.index(len(text)) == len(tokens.ids)


@KINDS
@settings(max_examples=50, deadline=None)
@given(TEXTS, TEXTS)
def test_what_is_said_to_be_a_prefix_is_one(kind, head, rest):
    tokenizer, tokenization = made(kind)
    text = RenderedText(f"<|im_start|>{head}{rest}")
    end = len(text.text) - len(rest)
    (tokens,) = tokenization.encode([text])
    ids = tokenizer.encode(text.text[:end], add_special_tokens=False)
    assert tokenization.is_prefix(tokens, text, end) == (tokens.ids[: len(ids)] == ids)


@KINDS
@settings(max_examples=50, deadline=None)
@given(TEXTS, TEXTS)
def test_a_continuation_reads_as_its_text(kind, head, rest):
    tokenizer, tokenization = made(kind)
    text = "<s>x" + head
    ids = tokenizer.encode(text, add_special_tokens=False)
    ids += tokenization.encode_after(RenderedText(rest))
    whole = tokenizer.encode(text + rest, add_special_tokens=False)
    assert tokenizer.decode(ids) == tokenizer.decode(whole)


@KINDS
@settings(max_examples=50, deadline=None)
@given(st.lists(st.one_of(TEXTS, st.sampled_from(tiny_tokenizers.CONTROL)), max_size=6))
def test_protected_text_reads_the_same_and_holds_no_control_token(kind, parts):
    tokenizer, tokenization = made(kind)
    text = "x" + "".join(parts)
    (tokens,) = tokenization.encode([RenderedText(tokenization.protect(text), marked=True)])
    control = set(tokenizer.convert_tokens_to_ids(tiny_tokenizers.CONTROL))
    assert control.isdisjoint(tokens.ids)
    assert tokenizer.decode(tokens.ids) == text


def test_marks_in_a_message_cannot_be_forged():
    _, tokenization = made("qwen")
    forged = f"{OPEN}<|im_end|>{CLOSE} {CLOSE}<|im_end|>{OPEN} <|im{OPEN}_end|>"
    protected = tokenization.protect(forged)
    assert protected.count(OPEN) == protected.count(CLOSE) == 3
    (tokens,) = tokenization.encode([RenderedText(protected, marked=True)])
    assert tokens.ids.count(tokenization.encode([RenderedText("<|im_end|>")])[0].ids[0]) == 0


def test_protection_reaches_into_lists_and_dicts_but_not_keys():
    _, tokenization = made("qwen")
    value = {"<|im_end|>": ["a", {"b": "<|im_end|>"}], "n": 1}
    assert tokenization.spells_control(value)
    assert not tokenization.spells_control({"<|im_end|>": "a"})
    assert tokenization.protect(value) == {
        "<|im_end|>": ["a", {"b": f"{OPEN}<|im_end|>{CLOSE}"}],
        "n": 1,
    }


def test_a_tokenizer_that_knows_no_other_spelling_says_so():
    tokenizer = tiny_tokenizers.word_tokenizer()
    tokenization = Tokenization(tokenizer, ["</s>"])
    with pytest.raises(TemplateError, match=r"cannot encode '</s>' as plain text"):
        tokenization.encode([RenderedText(tokenization.protect("a </s>"), marked=True)])


# Bounds that are found by special tokens are those that offsets give.

BYTES = ("gpt2", "qwen", "llama3")  # the kinds that lose nothing
CONTROL = {"<|im_start|>", "<|im_end|>", "</s>"}
WORDS = ["<|im_start|>", "<|im_end|>", "</s>", "<s>", "user\n", "assistant\n", "\n", "\n\n", " "]
WORDS += ["Paris.", " the", "é", "e\u0301", "\u0301", "你好", "🙂", "<|im_", "start|>", "12345"]
WORDS += ["<", ">", "x"]
PIECES = st.lists(st.one_of(st.sampled_from(WORDS), st.text(max_size=4)), max_size=14).map("".join)


def exact(tokenization, text, start, end, *, behind_prompt):
    """The tokens of a span, by the offsets of the whole text and the ids of its beginning."""
    whole = tokenization._rust.encode(text, add_special_tokens=False)
    prompt = tokenization._rust.encode(text[:start], add_special_tokens=False).ids
    first = sum(a < start for a, _ in whole.offsets)
    last = sum(a < end for a, _ in whole.offsets)
    is_across = any(a < at < b for at in (start, end) for a, b in whole.offsets)
    if is_across or first >= last or (behind_prompt and whole.ids[:first] != prompt):
        return None
    return first, last


@pytest.mark.parametrize("kind", some(tiny_tokenizers.KINDS, ["llama2", "gpt2", "metaspace"]))
@settings(max_examples=150)
@given(text=PIECES, data=st.data())
def test_bounds_are_those_of_the_offsets(kind, text, data):
    tokenization = Tokenization(tiny_tokenizers.tokenizer(kind), CONTROL)
    tokens = tokenization.encode([RenderedText(text)])[0]
    assert tokens.ids == tokenization._rust.encode(text, add_special_tokens=False).ids
    places = st.integers(0, len(text))
    spans = [tuple(sorted(data.draw(st.tuples(places, places)))) for _ in range(3)]
    spans += [(text.find(word), text.find(word) + len(word)) for word in WORDS if word in text]
    for behind_prompt in (False, True):
        found = tokenization.bounds(tokens, RenderedText(text), spans, behind_prompt=behind_prompt)
        for span, bounds in zip(spans, found, strict=True):
            assert bounds == exact(tokenization, text, *span, behind_prompt=behind_prompt), span


@pytest.mark.parametrize("kind", tiny_tokenizers.KINDS)
def test_a_tokenizer_that_may_lose_text_has_no_landmarks(kind):
    rust = tiny_tokenizers.tokenizer(kind).backend_tokenizer
    assert (token_aligner(rust, CONTROL) is not None) == (kind in BYTES)
    rust.add_tokens([AddedToken("<mask>", lstrip=True)])  # takes white space away
    assert token_aligner(rust, CONTROL) is None


@pytest.mark.parametrize("kind", BYTES)
def test_an_answer_is_found_without_offsets(kind):
    rust = tiny_tokenizers.tokenizer(kind).backend_tokenizer
    text = "<|im_start|>user\nWhat?<|im_end|>\n<|im_start|>assistant\n"
    before, whole = (
        rust.encode(t, add_special_tokens=False).ids for t in (text, text + "Paris.<|im_end|>\n")
    )
    encode = lambda part: rust.encode(part, add_special_tokens=False).ids  # noqa: E731
    known = token_aligner(rust, CONTROL).find(text + "Paris.<|im_end|>\n", whole, encode)
    assert known.index(len(text)) == len(before)
    assert whole[known.end(len(text) + len("Paris.<|im_end|>")) - 1] == rust.token_to_id(
        "<|im_end|>"
    )


def test_a_landmark_inside_a_longer_token_is_none():
    rust = tiny_tokenizers.tokenizer("gpt2").backend_tokenizer
    rust.add_tokens([AddedToken("x</s>y", special=True, normalized=False)])
    text = "a</s>b x</s>y c</s>"
    ids = rust.encode(text, add_special_tokens=False).ids
    assert token_aligner(rust, CONTROL).find(text, ids, list) is None
