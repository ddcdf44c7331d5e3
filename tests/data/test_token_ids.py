"""Rows of token ids: read as they are, checked, and never tokenized again."""

import json

import pytest

from folders import save_model, save_recipe
from surefoot.data.rows.catalog import training_examples
from surefoot.errors import DataError
from surefoot.recipe.recipe import load
from surefoot.recipe.recipe_data import open_codec
from surefoot.run.training_run import run

ROWS = [
    {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8], "attention_mask": [1, 1, 1, 1]},
    {
        "input_ids": [0, 5, 6, 7, 0],
        "labels": [-100, -100, 6, 7, -100],
        "attention_mask": [0, 1, 1, 1, 0],
    },
    {"input_ids": [9, 10, 11], "labels": None, "attention_mask": None},
]
ITEMS = [
    ([5, 6, 7, 8], [-100, -100, 7, 8]),
    ([5, 6, 7], [-100, 6, 7]),
    ([9, 10, 11], [9, 10, 11]),
]


def project(tmp_path, rows, **data):
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"datasets": ["rows.jsonl"], "dataset_dir": str(tmp_path), **data}
    save_model(tmp_path / "model")
    train = {"eval_steps": None, "max_steps": 1, "global_batch_size": 2}
    data |= {"max_broken_rows": 0}
    path = save_recipe(tmp_path, data=data, train=train)
    content = json.loads(path.read_text())
    del content["data"]["val_size"]
    path.write_text(json.dumps(content))
    return path


def items(tmp_path, stage, rows, **data):
    """What the stage makes of the rows."""
    recipe = load(project(tmp_path, rows, **data), [f"stage={stage}"])
    codec = open_codec(recipe, tmp_path / "model")
    return recipe.stage.encode(list(training_examples(recipe.data)), codec)


@pytest.mark.parametrize("stage", ["sft", "pt"])
def test_ids_and_labels_are_those_of_the_row(tmp_path, stage):
    outcomes = items(tmp_path, stage, ROWS)
    assert [(i["input_ids"], i["labels"]) for (i,) in outcomes] == ITEMS
    assert run(load(tmp_path / "recipe.yaml", [f"stage={stage}"])).state.global_step == 1


def test_a_long_row_is_truncated_for_responses_and_split_for_texts(tmp_path):
    row = {"input_ids": list(range(5, 12))}
    (cut,) = items(tmp_path / "a", "sft", [row], cutoff_len=4)
    assert [i["input_ids"] for i in cut.features] == [[5, 6, 7, 8]]
    (pieces,) = items(tmp_path / "b", "pt", [row], cutoff_len=4)
    assert [i["input_ids"] for i in pieces] == [[5, 6, 7, 8], [9, 10, 11]]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"labels": [5, 6]}, "'labels': expected as many values as 'input_ids' has, 3, got 2"),
        (
            {"labels": [6, 7, -100]},
            "'labels': expected -100 or the id at the same position (5), got 6",
        ),
        ({"attention_mask": [1, 0, 1]}, "0 for padding at the ends alone"),
        ({"attention_mask": [1, 2, 1]}, "expected 1 for each token"),
        ({"input_ids": [1, "a", 2]}, "'input_ids': expected a list of whole numbers"),
        ({"input_ids": [5, 999, 7]}, "token id 999 is not in the vocabulary"),
    ],
)
def test_a_row_that_is_wrong_is_named(tmp_path, row, problem):
    with pytest.raises(DataError) as error:
        items(tmp_path, "sft", [ROWS[0], {"input_ids": [5, 6, 7], **row}])
    assert "rows.jsonl" in str(error.value)
    assert "1" in str(error.value).partition(problem)[0]
    assert problem in str(error.value)
