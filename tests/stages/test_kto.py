"""KTO against a loop over its formula, in float64."""

import logging
import math
import re
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import surefoot
import tiny
from project import Project, tokenizer
from stage_data import examples_of
from surefoot.batch import IGNORE_INDEX, Outputs
from surefoot.data.example import Dropped, Example, Message
from surefoot.data.section import DataSection
from surefoot.data.store.dataset import in_memory
from surefoot.data.text.codec import Codec
from surefoot.data.text.templates import load_template
from surefoot.errors import DataError, RecipeError
from surefoot.schema import read
from surefoot.stages._kto import KTO, mismatched
from surefoot.training.evaluation import windows_of


def likelihood(role, item):
    """A log-probability that depends on all tokens and where each one is."""
    pairs = enumerate(zip(item["input_ids"], item["labels"], strict=True))
    trained = [i * int(x) for i, (x, label) in pairs if label != IGNORE_INDEX]
    return -(0.3 if role == "policy" else 0.29) * math.log(sum(trained) + 2)


@dataclass(frozen=True)
class Models:
    """A context of models that are formulas."""

    codec = SimpleNamespace(section=DataSection(datasets=("any",), cutoff_len=64))

    def reduce(self, role, examples, function):
        return np.array([likelihood(role, item) for item in examples])


def prepared(stage, items, context=Models()):
    return stage.prepare(context, stage.precompute(context, items))


def outputs(items):
    """Log-probabilities of tokens that add up to those of answers."""
    found = []
    for item in items:
        count = int((np.asarray(item["labels"])[1:] != IGNORE_INDEX).sum())
        found += [likelihood("policy", item) / count] * count
    return Outputs(logps=torch.tensor(found, dtype=torch.float64))


def expected(stage, items):
    """The loss of each answer by TRL's formula (KTOTrainer.kto_loss), and z."""
    ratios = [likelihood("policy", item) - likelihood("reference", item) for item in items]
    pairs = mismatched(items, 64)
    z = np.mean([likelihood("policy", p) - likelihood("reference", p) for p in pairs])
    z = max(0.0, float(z)) if stage.loss_type == "kto" else 0.0
    losses = []
    for item, ratio in zip(items, ratios, strict=True):
        good = item["desirable"][0] > 0
        inner = stage.beta * ((ratio - z) if good else (z - ratio))
        weight = stage.desirable_weight if good else stage.undesirable_weight
        losses.append(weight * (1 - 1 / (1 + math.exp(-inner))))
    return losses, z, ratios


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize(
    "stage",
    [KTO(), KTO(beta=0.7, undesirable_weight=1.5), KTO(loss_type="apo_zero_unpaired")],
    ids=str,
)
def test_the_loss_is_that_of_the_formula(stage, packing):
    items = list(examples_of("kto", 9))
    window = prepared(stage, items)
    losses, z, ratios = expected(stage, items)
    assert window.figures == ({"kl": pytest.approx(z)} if stage.loss_type == "kto" else {})
    batch = stage.collate(window.examples, packing=packing)
    loss = stage.loss("policy", outputs(items), batch)
    assert float(loss.total) == pytest.approx(sum(losses), rel=1e-12)
    assert loss.weight == 9
    good = [bool(item["desirable"][0]) for item in items]
    for kind, wanted in (("chosen", True), ("rejected", False)):
        rewards = [stage.beta * r for r, g in zip(ratios, good, strict=True) if g is wanted]
        mean = float(loss.metrics[f"rewards/{kind}"] / loss.weight)
        assert mean == pytest.approx(np.mean(rewards), rel=1e-9)


def test_each_prompt_gets_the_answer_of_the_example_before():
    items = [
        {"input_ids": [1, 2, 3], "labels": [-100, -100, 3]},
        {"input_ids": [4, 5, 6, 7], "labels": [-100, 5, 6, 7]},
        {"input_ids": [8, 9], "labels": [-100, 9]},
    ]
    pairs = mismatched(items, 64)
    assert [item["input_ids"] for item in pairs] == [[1, 2, 9], [4, 3], [8, 5, 6, 7]]
    assert pairs[2]["labels"] == [-100, 5, 6, 7]


def test_a_mismatched_pair_is_cut_at_the_cutoff_and_nowhere_else():
    items = [
        {"input_ids": [1] * 6 + [2], "labels": [-100] * 6 + [2]},
        {"input_ids": [3, *range(10, 16)], "labels": [-100, *range(10, 16)]},
    ]
    assert mismatched(items, 64)[0]["input_ids"] == [1] * 6 + [*range(10, 16)]
    assert mismatched(items, 9)[0]["input_ids"] == [1] * 6 + [10, 11, 12]
    assert mismatched(items, 9)[0]["labels"] == [-100] * 6 + [10, 11, 12]


class Llamas:
    """A context of tiny models of float64; each example is computed alone."""

    def __init__(self, made):
        section = DataSection(datasets=("any",), cutoff_len=128)
        self.codec = Codec(made, load_template("chatml", made), section)
        self.models = {
            role: tiny.model(vocab_size=len(made), rms_norm_eps=eps, dtype=torch.float64)
            for role, eps in (("reference", 1e-6), ("policy", 0.3))
        }

    def outputs(self, role, item):
        ids, labels = (torch.tensor(item[name]) for name in ("input_ids", "labels"))
        logps = self.models[role](ids[None]).logits[0, :-1].log_softmax(-1)
        chosen = logps.gather(1, ids[1:, None])[:, 0]
        return Outputs(logps=chosen[labels[1:] != IGNORE_INDEX])

    def reduce(self, role, examples, function):
        with torch.no_grad():
            return np.array(
                [
                    float(function(self.outputs(role, item), KTO().collate([item], packing=True)))
                    for item in examples
                ]
            )


ROWS = [
    ("What is 1 plus 1?", "It is 2, I think.", True),
    ("And 2 plus 2?", "5.", False),
    ("Say more.", "No.", True),
    ("What is the weather like?", "Sunny and warm, with some clouds.", False),
]


def theirs(context, made):
    """TRL's KTOTrainer: the prompt up to the beginning of the response, the response up to its end
    token, mismatched by one row; the loss, and z."""

    def likelihood(role, prompt, answer):
        ids = torch.tensor([*prompt, *answer])
        logps = context.models[role](ids[None]).logits[0].log_softmax(-1)
        return sum(logps[i - 1, ids[i]] for i in range(len(prompt), len(ids)))

    prompts = [
        made.apply_chat_template(
            [{"role": "user", "content": asked}], add_generation_prompt=True, return_dict=False
        )
        for asked, _, _ in ROWS
    ]
    end = made.convert_tokens_to_ids("<|im_end|>")
    answers = [[*made.encode(said, add_special_tokens=False), end] for _, said, _ in ROWS]

    def ratios(pairs):
        return [likelihood("policy", *p) - likelihood("reference", *p).detach() for p in pairs]

    others = [answers[-1], *answers[:-1]]
    z = torch.stack(ratios(zip(prompts, others, strict=True))).mean().detach().clamp(min=0)
    inner = [
        0.1 * (ratio - z if is_good else z - ratio)
        for ratio, (_, _, is_good) in zip(
            ratios(zip(prompts, answers, strict=True)), ROWS, strict=True
        )
    ]
    return torch.stack([1 - x.sigmoid() for x in inner]).mean(), float(z)


def test_loss_gradient_and_baseline_are_trls_where_a_template_writes_after_the_end_token():
    """ChatML writes a newline there, which is neither trained nor sampled."""
    context = Llamas(made := tokenizer())
    rows = [
        Example((Message("user", asked), Message("assistant", said)), label=is_good)
        for asked, said, is_good in ROWS
    ]
    items = [outcome[0] for outcome in KTO().encode(rows, context.codec)]
    assert all(item["labels"][-1] == IGNORE_INDEX for item in items)
    window = prepared(KTO(), items, context)
    expected, z = theirs(context, made)
    assert z > 0.01
    assert window.figures["kl"] == pytest.approx(z, rel=1e-9)
    parts = [context.outputs("policy", item).logps for item in window.examples]
    batch = KTO().collate(window.examples, packing=True)
    loss = KTO().loss("policy", Outputs(logps=torch.cat(parts)), batch)
    ours = loss.total / loss.weight
    assert ours.item() == pytest.approx(expected.item(), rel=1e-9)
    weights = list(context.models["policy"].parameters())
    mine, other = (
        torch.cat([g.flatten() for g in torch.autograd.grad(x, weights)]) for x in (ours, expected)
    )
    assert float((mine - other).norm() / other.norm()) < 1e-9


def test_a_window_of_one_row_has_no_other_to_be_compared_with(caplog):
    """The end of an epoch of a stream may be one; nothing else reaches it."""
    items = list(examples_of("kto", 1))
    with caplog.at_level(logging.WARNING):
        assert not prepared(KTO(), items).examples
    assert "one row" in caplog.text
    assert len(prepared(KTO(loss_type="apo_zero_unpaired"), items).examples) == 1


def test_a_run_that_would_train_on_a_window_of_one_row_is_refused(tmp_path):
    made = Project(tmp_path, stage="kto", data={"datasets": ["marked"], "val_size": 3})
    alone = {"train.global_batch_size": 1, "train.micro_batch_size": 1}
    with pytest.raises(DataError, match=r"each row would be alone.*global_batch_size=3,"):
        surefoot.train(made.recipe, **alone)
    stream = {**alone, "data.streaming": True, "stage.kto.precompute_reference": False}
    with pytest.raises(DataError, match=r"each row would be alone.*global_batch_size=2,"):
        surefoot.train(made.recipe, **stream)
    last = {"train.global_batch_size": 5, "train.micro_batch_size": 1}
    with pytest.raises(DataError, match=r"last of 21 rows would be alone.*global_batch_size=6,"):
        surefoot.train(made.recipe, **last)
    steps = {"train.max_steps": 1}  # none of which reaches the end of an epoch
    assert surefoot.train(made.recipe, **last, **steps).state.global_step == 1


def test_a_single_row_at_the_end_of_an_evaluation_joins_the_window_before_it():
    bounds = [[int(w[0]), int(w[-1])] for w in windows_of(9, 4).values()]
    assert bounds == [[0, 3], [4, 8]]
    assert [len(w) for w in windows_of(10, 4).values()] == [4, 4, 2]
    assert [len(w) for w in windows_of(2, 1).values()] == [1, 1]
    assert [len(w) for w in windows_of(1, 4).values()] == [1]


def test_the_baseline_is_never_below_0():
    items = list(examples_of("kto", 4))

    class Worse(Models):
        def reduce(self, role, examples, function):
            return np.full(len(examples), -2.0 if role == "policy" else -1.0)

    context = Worse()
    assert KTO().prepare(context, KTO().precompute(context, items)).figures == {"kl": 0}


class Chats:
    def encode_chats(self, examples):
        return [[{"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}] for _ in examples]


def test_rows_without_a_label_are_dropped_and_only_last_answers_are_trained_on():
    asked = (Message("user", "Hi"), Message("assistant", "Ho"))
    rows = [Example(asked, label=True), Example(asked), Example(asked, label=False)]
    first, second, third = KTO().encode(rows, Chats())
    assert (first[0]["desirable"], third[0]["desirable"]) == ([1], [0])
    assert isinstance(second, Dropped)
    assert "kto_tag" in second.reason


@pytest.mark.parametrize("name", ["label", "kto_tag"])
@pytest.mark.parametrize(
    ("good", "bad"),
    [(True, False), (1, 0), (1.0, 0.0), ("true", "False"), ("1", "0"), ("yes", "no")],
)
def test_labels_of_any_plain_form_are_read_without_an_entry(name, good, bad):
    asked = (Message("user", "Hi"), Message("assistant", "Ho"))
    rows = [Example(asked, columns={name: value}) for value in (good, bad, 2, None)]
    first, second, *others = KTO().encode(rows, Chats())
    assert (first[0]["desirable"], second[0]["desirable"]) == ([1], [0])
    assert all("a column 'label' with true or false" in each.reason for each in others)


@pytest.mark.parametrize("settings", [{"beta": 0}, {"desirable_weight": -1}])
def test_settings_that_mean_nothing_are_refused(settings):
    with pytest.raises(RecipeError, match=next(iter(settings))):
        read(KTO, settings)


@pytest.mark.parametrize(
    ("kinds", "settings", "words"),
    [
        ([1, 1, 0, 0], {}, None),
        ([1] * 4 + [0] * 3, {}, None),
        ([1] * 9 + [0] * 3, {"undesirable_weight": 2.5}, None),
        (
            [1] * 30 + [0] * 3,
            {},
            "30 desirable .* weight 1 and 3 .* ratio 10, .* desirable_weight from 0.1 to 0.133, "
            "or undesirable_weight from 7.5 to 10$",
        ),
        ([1, 0, 0], {"desirable_weight": 1.5}, "ratio 0.75"),
        ([1, 1], {}, "all 2 examples are desirable"),
        ([0], {}, "all 1 examples are undesirable"),
    ],
)
def test_kinds_that_are_not_balanced_are_named_with_weights_that_would_be(kinds, settings, words):
    found = list(KTO(**settings).remarks(in_memory([{"desirable": [kind]} for kind in kinds]), {}))
    assert len(found) == (words is not None)
    assert words is None or re.search(words, found[0])
    for name in ("desirable_weight", "undesirable_weight"):
        if words and (
            span := re.search(f"(?:Set|or) {name} from ([0-9.]+) to ([0-9.]+)", found[0])
        ):
            middle = (float(span[1]) + float(span[2])) / 2
            again = KTO(**{**settings, name: middle})
            assert not list(again.remarks(in_memory([{"desirable": [kind]} for kind in kinds]), {}))
