"""BLEU-4 and ROUGE have the figures of LLaMA-Factory's own code, on Chinese and English rows."""

import json
from pathlib import Path

import pytest

pytest.importorskip("jieba", exc_type=ImportError)
pytest.importorskip("rouge_chinese", exc_type=ImportError)
from surefoot.use.run_evaluation import row_scores, similarity

RECORDED = json.loads((Path(__file__).parent / "text_similarity.json").read_text())


def test_each_row_has_their_figures():
    for pair, row in zip(RECORDED["pairs"], RECORDED["rows"], strict=True):
        assert row_scores(*pair) == row


def test_means_have_their_figures():
    responses, references = zip(*RECORDED["pairs"], strict=True)
    found = similarity(responses, references)
    assert {name: found[name] for name in RECORDED["all"]} == RECORDED["all"]
    assert list(found) == ["bleu-4", "rouge-1", "rouge-2", "rouge-l", "sacrebleu"]


def test_sacrebleu_is_that_of_the_corpus():
    import sacrebleu

    texts, references = ["the cat sat on the mat today"], ["the cat sat on a mat today"]
    expected = sacrebleu.corpus_bleu(texts, [references]).score
    assert similarity(texts, references)["sacrebleu"] == expected
    same = similarity(["今天天气很好啊"], ["今天天气很好啊"])
    assert same["sacrebleu"] == pytest.approx(100)
    assert same["bleu-4"] == 100


@pytest.mark.proof
def test_long_texts_are_compared():
    text = " ".join(f"word{n}" for n in range(1100))
    assert row_scores(text, text)["rouge-l"] == pytest.approx(100, abs=1e-3)
