"""Bounds that are found by special tokens are those that offsets give."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

import tiny_tokenizers
from surefoot.data.text.tokenization import RenderedText, Tokenization, token_aligner

BYTES = ("gpt2", "qwen", "llama3")  # the kinds that lose nothing
CONTROL = {"<|im_start|>", "<|im_end|>", "</s>"}
WORDS = [
    "<|im_start|>",
    "<|im_end|>",
    "</s>",
    "<s>",
    "user\n",
    "assistant\n",
    "\n",
    "\n\n",
    " ",
    "x",
]
WORDS += [
    "Paris.",
    " the",
    "é",
    "e\u0301",
    "\u0301",
    "你好",
    "🙂",
    "<|im_",
    "start|>",
    "12345",
    "<",
    ">",
]
TEXTS = st.lists(st.one_of(st.sampled_from(WORDS), st.text(max_size=4)), max_size=14).map("".join)


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


@pytest.mark.parametrize("kind", tiny_tokenizers.KINDS)
@settings(max_examples=150)
@given(text=TEXTS, data=st.data())
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
