"""Continuations behind shared prompts have the likelihoods that each has by itself."""

from itertools import product

import pytest
import torch

import tiny
from each import some
from surefoot.generate import likelihood
from surefoot.generate.likelihood import Question, likelihoods, share_of


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Stems of few tokens are shared, too."""
    monkeypatch.setattr(likelihood, "_WORTH", 64)


def ids(seed, count):
    return tuple((seed * 31 + n * n * 7 + n * 3) % 64 for n in range(count))


def asked():
    """Two families behind 40 and 45 tokens, questions that share nothing, and one of one token."""
    found = []
    for family, length in ((1, 40), (2, 45)):
        for n in range(5):
            ends = tuple(ids(100 * family + 10 * n + c, 1 + (n + c) % 5) for c in range(4))
            found.append(Question(ids(family, length) + ids(n + 7, 1 + 3 * n), ends))
    found += [Question(ids(50 + n, 1 + 6 * n), (ids(n, 4), ids(n + 1, 1))) for n in range(4)]
    return [*found[::2], *found[1::2]]


def alone(model, question, continuation):
    """In float64, by a pass of its own, token by token."""
    row = torch.tensor([[*question.prompt, *continuation]])
    with torch.no_grad():
        logps_TV = model(input_ids=row, use_cache=False).logits[0].double().log_softmax(-1)
    places = range(len(question.prompt) - 1, len(row[0]) - 1)
    picked = [float(logps_TV[t, i]) for t, i in zip(places, continuation, strict=True)]
    best = [int(logps_TV[t].argmax()) == i for t, i in zip(places, continuation, strict=True)]
    return sum(picked), all(best)


KINDS = ("llama", "qwen2", "mistral", "gemma2", "qwen3_moe")


@pytest.mark.parametrize(
    ("batch_size", "kind"),
    some(
        [*product((1, 3, 16), KINDS)],
        [(1, "mistral"), (3, "gemma2"), (3, "llama"), (16, "qwen3_moe")],
    ),
)
def test_each_continuation_is_scored_as_alone(kind, batch_size):
    model, questions = tiny.model(kind), asked()
    found = dict(likelihoods(model, questions, batch_size=batch_size))
    assert sorted(found) == list(range(len(questions)))
    for index, question in enumerate(questions):
        for one, continuation in zip(found[index], question.continuations, strict=True):
            logp, is_greedy = alone(model, question, continuation)
            assert one.logp == pytest.approx(logp, abs=1e-4)
            assert one.is_greedy == is_greedy


def test_greedy_continuations_are_known_as_such():
    model, prompt = tiny.model("llama"), ids(3, 9)
    best = []
    for _ in range(3):
        row = torch.tensor([[*prompt, *best]])
        best.append(int(model(input_ids=row).logits[0, -1].argmax()))
    question = Question(prompt, (tuple(best), (*best[:2], (best[2] + 1) % 64)))
    ((_, (one, other)),) = likelihoods(model, [question], batch_size=4)
    assert one.is_greedy and not other.is_greedy


class Counting:
    """Counts the tokens that a model computes."""

    def __init__(self, model):
        self.tokens = 0
        model.register_forward_pre_hook(self.add, with_kwargs=True)

    def add(self, module, args, kwargs):
        self.tokens += kwargs["input_ids"].numel()


def test_shared_prompts_are_computed_once():
    model = tiny.model("llama")
    shots = ids(1, 100)
    questions = [
        Question(shots + ids(n + 9, 5), tuple(ids(n + c, 4) for c in range(4))) for n in range(4)
    ]
    list(likelihoods(model, questions[:1], batch_size=4))  # which tries the model
    counter = Counting(model)
    list(likelihoods(model, questions, batch_size=4))
    assert counter.tokens == 100 + 4 * 4 * (5 + 3)


def test_windows_that_are_exceeded_are_those_of_a_row_alone(caplog):
    model = tiny.model("mistral", sliding_window=16)
    shots = ids(1, 90)
    questions = [Question(shots + ids(n, 3), (ids(2, 3), ids(3, 2))) for n in range(3)]
    for index, found in likelihoods(model, questions, batch_size=4):
        for one, continuation in zip(found, questions[index].continuations, strict=True):
            logp, _ = alone(model, questions[index], continuation)
            assert one.logp == pytest.approx(logp, abs=1e-4)
    assert not caplog.records


def test_replicas_divide_questions_and_keep_families():
    questions = asked()
    parts = [share_of(questions, index, 3) for index in range(3)]
    assert sorted(i for part in parts for i in part) == list(range(len(questions)))
    prompts = [questions[i].prompt for part in parts for i in part]
    assert prompts == sorted(prompts)
