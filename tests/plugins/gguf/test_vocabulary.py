"""SentencePiece vocabularies as llama.cpp reads them, by an encoder after its own algorithm."""

import json
from itertools import pairwise

import pytest
from tokenizers import Tokenizer

import tiny_tokenizers
from surefoot.errors import ModelError
from surefoot.plugins.gguf.vocabulary import model_name, vocabulary_of

TEXTS = ["Hello, world! 12345", "What is the capital of France? Paris.", "  def f(x):\n\t你好 é"]


def complete(kind="llama2"):
    """A tokenizer with all merges that its vocabulary allows, as those made of SentencePiece."""
    made = tiny_tokenizers.tokenizer(kind)
    content = json.loads(made.backend_tokenizer.to_str())
    vocab, merges = content["model"]["vocab"], []
    for token in vocab:
        if not token.startswith("<"):
            splits = [(token[:i], token[i:]) for i in range(1, len(token))]
            merges += [list(pair) for pair in splits if set(pair) <= vocab.keys()]
    content["model"]["merges"] = merges
    made._tokenizer = Tokenizer.from_str(json.dumps(content))
    return made


def encoded(found, text):
    """llama.cpp's llm_tokenizer_spm: join the neighbours with the highest score, leftmost first."""
    ids = {token: i for i, token in enumerate(found.tokens)}
    pieces = list((" " * bool(found.has_space_prefix) + text).replace(" ", "▁"))
    while True:
        pairs = [(a + b, i) for i, (a, b) in enumerate(pairwise(pieces))]
        known = [(-found.scores[ids[pair]], i) for pair, i in pairs if pair in ids]
        if not known:
            break
        at = min(known)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    return [
        i
        for piece in pieces
        for i in ([ids[piece]] if piece in ids else [ids[f"<0x{b:02X}>"] for b in piece.encode()])
    ]


@pytest.mark.parametrize("kind", ["llama2", "metaspace"])
def test_scores_merge_as_the_merges_do(kind, caplog):
    known = complete(kind)
    found = vocabulary_of(known, len(known) + 3, "here")
    assert (found.model, found.pre, found.has_space_prefix) == ("llama", "default", True)
    assert ("after special tokens" in caplog.text) == (kind == "metaspace")
    for text in TEXTS if kind == "llama2" else TEXTS[:2]:  # the last begins with a space
        assert encoded(found, text) == known(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(
    ("kind", "normalizer", "said"),
    [
        ("qwen", {"type": "NFC"}, "does not normalize texts (NFC)"),
        ("gpt2", None, ""),
        (
            "gpt2",
            {"type": "Sequence", "normalizers": [{"type": "NFKC"}, {"type": "Lowercase"}]},
            "(NFKC, Lowercase)",
        ),
        (
            "llama2",
            {
                "type": "Sequence",
                "normalizers": [
                    {"type": "Prepend", "prepend": "▁"},
                    {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
                ],
            },
            "",
        ),
        (
            "llama2",
            {
                "type": "Sequence",
                "normalizers": [
                    {"type": "Strip", "strip_left": True, "strip_right": True},
                    {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
                ],
            },
            "(Strip)",
        ),
    ],
)
def test_a_normalizer_that_llama_cpp_does_not_have_is_said(kind, normalizer, said, caplog):
    known = complete(kind) if kind == "llama2" else tiny_tokenizers.tokenizer(kind)
    content = json.loads(known.backend_tokenizer.to_str())
    content["normalizer"] = normalizer
    known._tokenizer = Tokenizer.from_str(json.dumps(content))
    vocabulary_of(known, len(known), "here")
    assert ("normalize" in caplog.text) == bool(said)
    assert said in caplog.text


def with_strips(**strips):
    """A tokenizer whose added tokens drop white space beside them."""
    known = tiny_tokenizers.tokenizer("llama2")
    content = json.loads(known.backend_tokenizer.to_str())
    for token in content["added_tokens"]:
        for side, names in strips.items():
            token[side] = names(token["content"])
    known._tokenizer = Tokenizer.from_str(json.dumps(content))
    return known


OF_PHI = {"rstrip": lambda token: token not in ("<unk>", "<s>", "<|endoftext|>")}


@pytest.mark.parametrize(
    ("architecture", "strips", "stem", "name", "is_said"),
    [
        ("phi3", OF_PHI, "my-tuned", "phi3 my-tuned", False),
        ("phi3", OF_PHI, "Phi-3.5-mini", "Phi-3.5-mini", False),
        ("phi3", {}, "my-tuned", "my-tuned", False),
        ("phi3", {}, "phi3-tuned", "phi 3-tuned", False),
        ("llama", {}, "not-Phi-3", "not-phi 3", False),
        ("llama", OF_PHI, "mine", "mine", True),
        ("phi3", {"rstrip": lambda token: token != "<s>"}, "mine", "phi3 mine", True),
        ("llama", {"lstrip": lambda token: token == "</s>"}, "mine", "mine", True),
    ],
)
def test_the_name_says_phi3_where_white_space_after_special_tokens_is_dropped(
    architecture, strips, stem, name, is_said, caplog
):
    found = model_name(stem, with_strips(**strips), architecture, "here")
    assert (found, "white space beside" in caplog.text) == (name, is_said)


def test_kinds_of_tokens():
    known = complete()
    found = vocabulary_of(known, len(known) + 1, "here")
    kinds = dict(zip(found.tokens, found.types, strict=True))
    assert (kinds["<unk>"], kinds["</s>"], kinds["<0x0A>"], kinds["e"]) == (2, 3, 6, 1)
    assert kinds[f"[PAD{len(known)}]"] == 5


def test_merges_that_llama_cpp_would_add_are_refused():
    known = complete()
    content = json.loads(known.backend_tokenizer.to_str())
    del content["model"]["merges"][7]
    known._tokenizer = Tokenizer.from_str(json.dumps(content))
    with pytest.raises(ModelError, match="does not merge"):
        vocabulary_of(known, 500, "here")


def test_other_kinds_of_tokenizers_are_refused():
    with pytest.raises(ModelError, match="WordLevel"):
        vocabulary_of(tiny_tokenizers.word_tokenizer(), 3, "here")


def test_an_unknown_pre_tokenizer_is_refused_or_near_enough(monkeypatch):
    monkeypatch.setattr("surefoot.plugins.gguf.vocabulary._TEXTS", 1000)
    known = tiny_tokenizers.tokenizer("qwen")
    content = json.loads(known.backend_tokenizer.to_str())
    steps = content["pre_tokenizer"]["pretokenizers"]
    steps[0]["pattern"] = {"Regex": r"\s+|[^\s]"}
    known._tokenizer = Tokenizer.from_str(json.dumps(content))
    with pytest.raises(ModelError, match="no name in llama"):
        vocabulary_of(known, 500, "here")
    other = tiny_tokenizers.QWEN.removesuffix("+")  # equal, since longer white space came before
    steps[0]["pattern"] = {"Regex": other}
    known._tokenizer = Tokenizer.from_str(json.dumps(content))
    assert vocabulary_of(known, 500, "here").pre == "qwen2"
