"""A classifier, from rows with labels to labels that transformers predicts, too."""

import json

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import surefoot
from commands import ok, refused
from project import Project

METHODS = {"full": "full", "lora": {"lora": {"rank": 4}}}
NAMES = ["greeting", "sum", "farewell"]
WORDS = {"greeting": "hello there", "sum": "what is 1 plus 1", "farewell": "good bye then"}


def rows(count=24):
    """The label is in the words; each text has another number in it."""
    return [{"text": f"{i} {WORDS[NAMES[i % 3]]} {i}", "label": NAMES[i % 3]} for i in range(count)]


def several(count=24):
    """Any number of labels: those whose words are there."""
    made = []
    for i in range(count):
        labels = [name for place, name in enumerate(NAMES) if i % 8 >> place & 1]
        made.append({"text": " ".join(["so", str(i), *labels]), "labels": labels})
    return made


def project(folder, made, method="full", stage=(), **sections):
    settings = {"labels": NAMES, **dict(stage)}
    sections = {"data": {"datasets": ["texts"], "val_size": 0.25}, **sections}
    train = {"max_steps": 30, "eval_steps": 15, "global_batch_size": 6, "micro_batch_size": 6}
    optim = {"adamw": {"learning_rate": 0.02}}
    done = Project(
        folder,
        stage={"classify": settings},
        method=method,
        train=train,
        optim=optim,
        checkpoint={"save_steps": 30},
        **sections,
    )
    text = "".join(json.dumps(row) + "\n" for row in made)
    (folder / "data" / "texts.jsonl").write_text(text)
    (folder / "data" / "dataset_info.json").write_text(
        json.dumps({"texts": {"file_name": "texts.jsonl"}})
    )
    return done


@pytest.fixture(scope="module", params=["lora", "several"])
def trained(request, tmp_path_factory):
    """A run, the file of its rows, and what it predicts of them."""
    folder = tmp_path_factory.mktemp(request.param)
    is_several = request.param == "several"
    made = project(
        folder,
        several() if is_several else rows(),
        "full" if is_several else METHODS["lora"],
        {"multi_label": True} if is_several else {},
    )
    if is_several:  # plain texts need no chat template
        (folder / "model" / "chat_template.jinja").unlink()
    surefoot.train(made.recipe)
    texts, output = folder / "data" / "texts.jsonl", folder / "labels.jsonl"
    assert "labels of 24 rows" in ok("predict", made.run, "--prompts", texts, "--output", output)
    return made, [json.loads(line) for line in output.read_text().splitlines()]


def test_it_learns_and_transformers_answers_the_same(trained, tmp_path):
    made, found = trained
    is_several = "labels" in found[0]
    gold = [row["labels" if is_several else "label"] for row in found]
    right = sum(row["predicted"] == label for row, label in zip(found, gold, strict=True))
    assert is_several or right >= 20
    out = ok("export", made.run, tmp_path / "out")
    assert "verified: the logits of 12 fixed conversations" in out
    model, loading = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not any(loading.values())
    assert model.config.id2label == dict(enumerate(NAMES))
    kind = "multi" if is_several else "single"
    assert model.config.problem_type == f"{kind}_label_classification"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    for row in found:
        with torch.no_grad():
            logits = model.eval()(**tokenizer(row["text"], return_tensors="pt")).logits[0]
        expected = logits.sigmoid() if is_several else logits.softmax(-1)
        assert list(row["probabilities"]) == NAMES
        assert list(row["probabilities"].values()) == pytest.approx(
            expected.tolist(), rel=1e-3, abs=1e-4
        )
    texts, output = made.folder / "data" / "texts.jsonl", tmp_path / "alone.jsonl"
    ok("predict", tmp_path / "out", "--prompts", texts, "--output", output)
    alone = [json.loads(line) for line in (tmp_path / "alone.jsonl").read_text().splitlines()]
    assert [row["predicted"] for row in alone] == [row["predicted"] for row in found]


def test_eval_measures_f1_and_the_confusions(trained):
    made, found = trained
    metrics = json.loads(ok("eval", made.recipe, "--json"))
    last = json.loads((made.run / "all_results.json").read_text())
    for name in ("loss", "accuracy", "f1_micro", "f1_macro", "auc"):
        assert metrics[name] == pytest.approx(last[f"eval_{name}"], rel=1e-4)
    if "label" in found[0]:
        assert sum(metrics[f"confusion/{a}/{b}"] for a in NAMES for b in NAMES) == 6


def test_a_check_of_the_data_misses_no_responses(trained):
    made, _ = trained
    told = ok("data", "check", made.recipe)
    assert "24 rows" in told and "response" not in told


def test_it_writes_no_responses_and_needs_labels_that_it_knows(trained, tmp_path):
    made, _ = trained
    assert "a classifier labels" in refused("chat", made.run, "--prompt", "Hi")
    refused("export", made.run, tmp_path / "out", "--reward-head", "v_head")
    wrong = [{"text": "so", "label": "refund", "labels": ["refund"]}]
    path = made.folder / "data" / "texts.jsonl"
    before = path.read_text()
    path.write_text(before + json.dumps(wrong[0]) + "\n")
    told = refused("train", made.recipe, f"train.output_dir={tmp_path / 'other'}")
    path.write_text(before)
    assert "texts:24: the label 'refund' is none of stage.classify.labels: greeting, sum" in told
    one = project(tmp_path / "one", rows()[:1] * 4)
    assert "all 3 rows to train on have the same label (greeting)" in refused("train", one.recipe)
