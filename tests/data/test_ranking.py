"""Ranking rows become pairs; what gives none is counted under a reason that helps."""

from dataclasses import replace

import pytest

from project import tokenizer
from surefoot.batch import IGNORE_INDEX
from surefoot.data.example import Dropped, Example, Message, Truncated
from surefoot.data.section import DataSection
from surefoot.data.text.codec import Codec
from surefoot.data.text.collation import split
from surefoot.data.text.ranking import EQUAL, RANKED, UNRANKED, encode_pairs
from surefoot.data.text.templates import load_template
from surefoot.stages import SFT

QUESTION = (Message("user", "What is 1 plus 1?"),)
GOOD, BAD = Message("assistant", "It is 2."), Message("assistant", "It is 3, said the hen.")
PAIR = Example(messages=QUESTION, chosen=GOOD, rejected=BAD)
PLAIN = Example(messages=(*QUESTION, GOOD))


def codec(**settings):
    made = tokenizer()
    section = DataSection(datasets=("any",), **{"cutoff_len": 64, **settings})
    return Codec(made, load_template("auto", made), section)


def learnt(reader, item):
    pairs = zip(item["input_ids"], item["labels"], strict=True)
    return reader.tokenizer.decode([i for i, label in pairs if label != IGNORE_INDEX])


def test_a_pair_has_one_prompt_and_labels_on_both_answers():
    reader = codec()
    ((pair,),) = encode_pairs([PAIR], reader)
    prompt = reader.encode_prompt(QUESTION)
    assert pair["input_ids"][: pair["lengths"][0]] == prompt
    assert sum(pair["lengths"]) == len(pair["input_ids"])
    chosen, rejected = split(pair)
    assert learnt(reader, chosen) == "It is 2.<|im_end|>"
    assert learnt(reader, rejected) == "It is 3, said the hen.<|im_end|>"
    for item, answer in ((chosen, GOOD), (rejected, BAD)):
        ((alone,),) = reader.encode_chats([Example(messages=(*QUESTION, answer))])
        assert item["input_ids"].tolist() == alone["input_ids"]


def test_nothing_before_the_answers_is_learnt_whatever_it_says():
    reader = codec(cutoff_len=128)
    history = (Message("user", "Hello."), replace(BAD, learn=True), *QUESTION)
    ((pair,),) = encode_pairs([replace(PAIR, messages=history)], reader)
    assert learnt(reader, pair) == "It is 2.<|im_end|>It is 3, said the hen.<|im_end|>"


def test_a_row_without_two_answers_is_left_out_for_a_reason():
    same = replace(PAIR, rejected=GOOD)
    found = encode_pairs([PLAIN, PAIR, same, Example(text="Once.")], codec())
    assert [found[0], found[2], found[3]] == [UNRANKED, EQUAL, UNRANKED]
    assert '"ranking": true in dataset_info.json' in UNRANKED.reason


def test_an_answer_that_is_too_long_keeps_its_begin_and_is_counted():
    reader = codec()
    length = len(reader.encode_prompt(QUESTION)) + 3
    (cut,) = encode_pairs([PAIR], codec(cutoff_len=length))
    assert isinstance(cut, Truncated)
    (pair,) = cut.features
    assert pair["lengths"][1:] == [3, 3]
    (dropped,) = encode_pairs([PAIR], codec(cutoff_len=length, on_too_long="drop"))
    assert isinstance(dropped, Dropped)
    (dropped,) = encode_pairs([PAIR], codec(cutoff_len=length - 3))
    assert "no room" in dropped.reason


@pytest.mark.parametrize("examples", [[PAIR], [PLAIN, PAIR, PLAIN]], ids=len)
def test_supervised_fine_tuning_leaves_ranking_rows_out(examples):
    found = SFT().encode(examples, codec())
    assert [outcome is RANKED for outcome in found] == [e is PAIR for e in examples]
    assert "stage: dpo" in RANKED.reason
