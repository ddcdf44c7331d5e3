"""How similar responses are to their references: BLEU-4 and ROUGE as LLaMA-Factory computes them,
and the BLEU of a corpus by sacrebleu.

LLaMA-Factory splits texts into words with jieba for ROUGE, and into characters for BLEU-4, which it
computes for each response (nltk, smoothing 3); a metric is the mean over the responses.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import jieba
import numpy as np
from nltk.translate.bleu_score import SmoothingFunction, sentence_bleu
from rouge_chinese import Rouge
from sacrebleu.metrics.bleu import BLEU

jieba.setLogLevel(logging.WARNING)
_ROUGES = ("rouge-1", "rouge-2", "rouge-l")


def row_scores(response: str, reference: str) -> dict[str, float]:
    """BLEU-4 and the F measures of ROUGE of one response, from 0 to 100 with four digits."""
    words, expected = (" ".join(jieba.cut(text)) for text in (response, reference))
    scores = dict.fromkeys(_ROUGES, 0.0)
    if words.split() and expected.split():
        (rouge,) = Rouge().get_scores(words, expected)
        scores = {name: rouge[name]["f"] for name in _ROUGES}
    smoothing = SmoothingFunction().method3
    bleu = sentence_bleu([list(reference)], list(response), smoothing_function=smoothing)
    return {name: round(100 * value, 4) for name, value in {**scores, "bleu-4": bleu}.items()}


def similarity(responses: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """The means of ``row_scores``, and ``sacrebleu``, of at least one response. sacrebleu's
    tokenizer is the one for Chinese if the references have Chinese characters."""
    rows = [row_scores(*pair) for pair in zip(responses, references, strict=True)]
    means = {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}
    is_chinese = any("\u4e00" <= letter <= "\u9fff" for text in references for letter in text)
    bleu = BLEU(tokenize="zh" if is_chinese else "13a")
    score = bleu.corpus_score(list(responses), [list(references)]).score
    return {**{name: means[name] for name in ("bleu-4", *_ROUGES)}, "sacrebleu": float(score)}
