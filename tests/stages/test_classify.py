"""Classifiers against torch's losses and scikit-learn's metrics, and what rows must say."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from surefoot.batch import Outputs
from surefoot.data.example import Dropped, Example, Message, Truncated
from surefoot.data.section import DataSection
from surefoot.data.store.dataset import in_memory
from surefoot.data.text.codec import Codec
from surefoot.data.text.templates import load_template
from surefoot.errors import DataError, RecipeError
from surefoot.schema import read
from surefoot.stages import Classify
from tiny_tokenizers import tokenizer

NAMES = ("refund", "exchange", "praise")
WEIGHTS = {"label_weights": {"exchange": 3.0, "praise": 0.5}}
SMOOTH, FOCAL = {"label_smoothing_factor": 0.2}, {"focal_gamma": 2.0}


def stage(**settings):
    return Classify(labels=NAMES, **settings)


def codec(**settings):
    made = tokenizer()
    section = DataSection(datasets=("any",), **{"cutoff_len": 64, **settings})
    return Codec(made, load_template("chatml", made), section)


def encoded(made, values, of_codec=None, column="label"):
    rows = [
        Example(
            text=f"Text {i}.", columns={} if value is None else {column: value}, origin=f"d:{i}"
        )
        for i, value in enumerate(values)
    ]
    return made.encode(rows, of_codec or codec())


def batch_of(made, values, column, packing):
    items = [item for outcome in encoded(made, values, None, column) for item in outcome]
    return made.collate(items, packing=packing)


def logits(count):
    made = torch.Generator().manual_seed(0)
    return 2 * torch.randn(count, len(NAMES), dtype=torch.float64, generator=made)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize(
    "settings", [{}, WEIGHTS, SMOOTH, WEIGHTS | SMOOTH, FOCAL, WEIGHTS | FOCAL]
)
def test_the_loss_of_one_label_is_torchs(settings, packing):
    made, targets = stage(**settings), [2, 0, 1, 1]
    batch = batch_of(made, [NAMES[i] for i in targets], "label", packing)
    found = made.loss("policy", Outputs(values=logits(4)), batch)
    weights = torch.tensor([settings.get("label_weights", {}).get(n, 1.0) for n in NAMES]).double()
    total = 0.0
    for row, target in zip(logits(4), targets, strict=True):
        one = F.cross_entropy(
            row[None],
            torch.tensor([target]),
            weight=weights,
            reduction="sum",
            label_smoothing=made.label_smoothing_factor,
        )
        total += float(one) * float(1 - row.softmax(0)[target]) ** made.focal_gamma
    assert float(found.total) == pytest.approx(total, rel=1e-12)
    assert found.weight == 4
    right = sum(int(row.argmax()) == t for row, t in zip(logits(4), targets, strict=True))
    assert found.metrics["accuracy"] == right


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("settings", [{}, WEIGHTS, SMOOTH, FOCAL])
def test_the_loss_of_several_labels_is_a_loop_over_them(settings, packing):
    made, targets = stage(multi_label=True, **settings), [[0, 2], [], [1], [0, 1, 2]]
    batch = batch_of(made, [[NAMES[i] for i in each] for each in targets], "labels", packing)
    found = made.loss("policy", Outputs(values=logits(4)), batch)
    total = 0.0
    for row, true in zip(logits(4).sigmoid().tolist(), targets, strict=True):
        for i, p in enumerate(row):
            weight = settings.get("label_weights", {}).get(NAMES[i], 1.0)
            aim = (1 - made.label_smoothing_factor) * (i in true) + made.label_smoothing_factor / 2
            loss = -weight * aim * np.log(p) - (1 - aim) * np.log(1 - p)
            total += loss * (1 - p if i in true else p) ** made.focal_gamma / len(NAMES)
    assert float(found.total) == pytest.approx(total, rel=1e-12)


def judged(made, values, column, scores):
    return made.judged(Outputs(values=scores), batch_of(made, values, column, True)).numpy()


def test_metrics_are_those_of_scikit_learn():
    metrics = pytest.importorskip("sklearn.metrics")
    random = np.random.default_rng(3)
    targets, scores = (
        random.integers(0, 3, 50),
        torch.from_numpy(random.normal(size=(50, 3)).round(1)),
    )
    found = stage().summary(judged(stage(), [NAMES[i] for i in targets], "label", scores))
    predicted, chances = scores.numpy().argmax(1), scores.softmax(1).numpy()
    assert found["accuracy"] == metrics.accuracy_score(targets, predicted)
    for average in ("micro", "macro"):
        expected = metrics.f1_score(targets, predicted, average=average)
        assert found[f"f1_{average}"] == pytest.approx(expected)
    area = metrics.roc_auc_score(targets, chances, multi_class="ovr")
    assert found["auc"] == pytest.approx(area)
    table = metrics.confusion_matrix(targets, predicted)
    assert [[found[f"confusion/{a}/{b}"] for b in NAMES] for a in NAMES] == table.tolist()


def test_names_with_a_slash_have_confusions_of_their_own():
    """Of one of them, ``a/b`` and ``c``, the name would be that of ``a`` and ``b/c``."""
    names = ("a", "a/b", "c", "b/c")
    made = Classify(labels=names)
    rows = np.concatenate([np.arange(4.0)[:, None], np.eye(4)], 1)  # each is right
    found = {n: v for n, v in made.summary(rows).items() if n.startswith("confusion/")}
    assert len(found) == 16
    assert all(name.count("/") == 2 for name in found)  # the board finds both names
    assert sum(found.values()) == 4


def test_metrics_of_several_labels_are_those_of_scikit_learn():
    metrics = pytest.importorskip("sklearn.metrics")
    random, made = np.random.default_rng(4), stage(multi_label=True)
    truth, scores = random.integers(0, 2, (40, 3)), torch.from_numpy(random.normal(size=(40, 3)))
    values = [[NAMES[i] for i in np.flatnonzero(row)] for row in truth]
    found = made.summary(judged(made, values, "labels", scores))
    predicted = scores.numpy() > 0
    assert found["accuracy"] == metrics.accuracy_score(truth, predicted)
    for average in ("micro", "macro"):
        expected = metrics.f1_score(truth, predicted, average=average)
        assert found[f"f1_{average}"] == pytest.approx(expected)
    assert found["auc"] == pytest.approx(metrics.roc_auc_score(truth, scores.numpy()))


def test_a_row_that_is_omitted_has_no_weight_and_is_not_measured():
    made = stage()
    items = [item for outcome in encoded(made, ["refund", "praise"]) for item in outcome]
    batch = made.collate([items[0], made.without(items[1])], packing=True)
    found = made.loss("policy", Outputs(values=logits(2)), batch)
    assert found.weight == 1
    assert float(found.total) == pytest.approx(-float(logits(2)[0].log_softmax(0)[0]))
    assert np.isnan(made.judged(Outputs(values=logits(2)), batch).numpy()).any(1).tolist() == [
        False,
        True,
    ]


def test_a_label_is_a_name_or_its_number_and_a_list_may_be_json():
    outcomes = encoded(stage(), ["praise", 1, "0", 2.0])
    assert [item["classes"] for (item,) in outcomes] == [[2], [1], [0], [2]]
    yes_no = Classify(labels=("false", "true"), label_column="is_good")
    assert [item["classes"] for (item,) in encoded(yes_no, [True, "false"], None, "is_good")] == [
        [1],
        [0],
    ]
    outcomes = encoded(stage(multi_label=True), [["praise", 0], '["exchange"]', []], None, "labels")
    assert [item["classes"] for (item,) in outcomes] == [[1, 0, 1], [0, 1, 0], [0, 0, 0]]


def test_where_labels_are_numbers_a_row_has_their_names():
    """The third of 1, 2 and 3 is no 2, and 0 is none of them."""
    made = Classify(labels=("1", "2", "3"))
    assert [item["classes"] for (item,) in encoded(made, [1, "3", 2.0])] == [[0], [2], [1]]
    with pytest.raises(DataError, match=r"d:0: the label 0 is none of stage.classify.labels: 1, 2"):
        encoded(made, [0])


def test_a_label_that_is_unknown_is_named_with_its_row_and_a_missing_one_is_counted():
    with pytest.raises(
        DataError, match=r"d:1: the label 'refnd' is none of .*refund, exchange, praise"
    ):
        encoded(stage(), ["refund", "refnd"])
    for odd in (3, -1, 1.5, ["refund"], "", True):
        with pytest.raises(DataError, match=r"d:0: the label .* is none of"):
            encoded(stage(), [odd])
    (dropped,) = encoded(stage(), [None])
    assert isinstance(dropped, Dropped)
    assert "the column 'label'" in dropped.reason
    with pytest.raises(DataError, match="d:0: no list of labels in JSON"):
        encoded(stage(multi_label=True), ["[oops"], None, "labels")


def test_a_text_is_what_its_tokenizer_encodes_and_a_conversation_what_the_template_renders():
    made = codec()
    user, answer = Message("user", "Where is it?"), Message("assistant", "There.")
    rows = [Example(text="Where is it?"), Example((user,)), Example((user, answer))]
    labeled = [Example(row.messages, text=row.text, columns={"label": 0}) for row in rows]
    (text,), (question,), (answered,) = stage().encode(labeled, made)
    assert text["input_ids"] == made.tokenizer("Where is it?")["input_ids"]
    chat = [{"role": m.role, "content": m.content} for m in (user, answer)]
    template = made.template.source

    def rendered(turns, **options):
        return made.tokenizer.apply_chat_template(
            turns, chat_template=template, tokenize=False, **options
        )

    decode = made.tokenizer.decode
    assert decode(question["input_ids"]) == rendered(chat[:1], add_generation_prompt=True)
    assert decode(answered["input_ids"]) == rendered(chat).rstrip("\n")
    (short,) = stage().encode(labeled[:1], codec(cutoff_len=5))
    assert isinstance(short, Truncated)
    assert short.features[0]["input_ids"] == text["input_ids"][:5]
    (dropped,) = stage().encode(labeled[:1], codec(cutoff_len=5, on_too_long="drop"))
    assert isinstance(dropped, Dropped)


def test_a_model_without_a_template_reads_texts_and_drops_conversations():
    section = DataSection(datasets=("any",), cutoff_len=64)
    rows = [Example(text="So."), Example((Message("user", "So."), Message("assistant", "No.")))]
    labeled = [Example(row.messages, text=row.text, columns={"label": 0}) for row in rows]
    text, chat = stage().encode(labeled, Codec(tokenizer(), None, section))
    assert len(text) == 1
    assert isinstance(chat, Dropped)
    assert "set data.template" in chat.reason


def data_of(made, values):
    return in_memory([item for outcome in encoded(made, values) for item in outcome])


def test_one_label_alone_and_one_that_training_never_sees_are_named():
    made = stage()
    with pytest.raises(DataError, match=r"all 2 rows .* the same label \(refund\)"):
        list(made.remarks(data_of(made, ["refund", "refund"]), {}))
    train, held_out = data_of(made, ["refund", "praise"]), data_of(made, ["exchange", "refund"])
    first, second = made.remarks(train, {"held": held_out})
    assert "1 row of held" in first and "'exchange'" in first
    assert "no row to train on has 'exchange'" in second


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"labels": ["a"]}, "two or more different names"),
        ({"labels": ["a", "b", "a"]}, "two or more different names"),
        ({"labels": ["refund", "b"], "label_weights": {"refnd": 2}}, "did you mean refund"),
        ({"labels": ["a", "b"], "label_weights": {"a": 0}}, "positive"),
        ({"labels": ["a", "b"], "focal_gamma": 1, "label_smoothing_factor": 0.1}, "focal_gamma"),
        ({"labels": ["a", "b"], "label_smoothing_factor": 1}, "label_smoothing_factor"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings, message):
    with pytest.raises(RecipeError, match=message):
        read(Classify, settings)
