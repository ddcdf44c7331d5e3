"""Data settings that make no sense are refused."""

import pytest

from surefoot.data.section import DataSection
from surefoot.schema.locations import DatasetReference


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"datasets": ()}, "name at least one dataset"),
        ({"datasets": ("a", "b", "a")}, "datasets: 'a' is named twice"),
        ({"eval_datasets": ("b", "b")}, "eval_datasets: 'b' is named twice"),
        (
            {"eval_datasets": ("b",), "val_size": 0.1},
            "val_size and eval_datasets exclude each other",
        ),
        ({"val_size": -0.1}, "val_size must not be negative, got -0.1"),
        ({"val_size": 1.5}, "val_size is a share below 1 or a whole number of rows, got 1.5"),
        ({"cutoff_len": 3}, "cutoff_len must be at least 4 tokens, got 3"),
        ({"val_size": 0.1, "streaming": True}, "val_size must be a number of rows with streaming"),
        ({"buffer_size": 0}, "buffer_size must be at least 1, got 0"),
        ({"max_samples": 0}, "max_samples must be at least 1, got 0"),
        ({"max_broken_rows": -1}, "max_broken_rows must not be negative, got -1"),
        ({"train_on_prompt": True, "mask_history": True}, "exclude each other"),
    ],
)
def test_a_wrong_setting_says_what_is_right(settings, reason):
    with pytest.raises(ValueError, match=reason):
        DataSection(**{"datasets": ("a",), **settings})


def test_two_files_of_one_name_need_another_name():
    one, other = (DatasetReference.of(f"{folder}/x.jsonl") for folder in ("train", "test"))
    assert (one, other) == ("x.jsonl", "x.jsonl")
    assert one != other
    with pytest.raises(ValueError, match=r"'x.jsonl' is another one of datasets; .*\{name: other"):
        DataSection(datasets=(one,), eval_datasets=(other,))
    DataSection(datasets=(one,), eval_datasets=(one,))


@pytest.mark.parametrize("val_size", [0, 0.5, 1, 1.0, 20])
def test_val_size_is_a_share_or_a_number(val_size):
    assert DataSection(datasets=("a",), val_size=val_size).val_size == val_size
