"""What is evaluated on is what training kept out, whichever model is asked."""

from contextlib import nullcontext
from pathlib import Path

import pytest

from folders import save_data, save_model, save_recipe, tokenizer
from surefoot.data.text.codec import Codec
from surefoot.data.text.templates import load_template
from surefoot.data.training_data import open_stream
from surefoot.errors import DataError, RecipeError
from surefoot.parallel.world import ALONE
from surefoot.recipe.recipe import load
from surefoot.recipe.recipe_data import encoding_of
from surefoot.run.parts import RunParts
from surefoot.use.evaluation import held_out
from surefoot.use.model_loading import PLAINLY
from surefoot.use.run_evaluation import evaluate_run, parts_of_start

NO_VAL = {"val_size": 0}
QUIET = {"eval_steps": None}


def open_codec(recipe):
    known = tokenizer()
    return Codec(known, load_template("auto", known), recipe.data)


def parts_of(recipe):
    """The parts of the recipe; around another tokenizer, if its model is gone."""
    given = RunParts.around(recipe, open_codec(recipe), Path(recipe.model.path))
    return parts_of_start(recipe) or given


def texts(parts):
    return [[e.messages[0].content for e in part.examples] for part in parts]


def test_val_size_holds_out_just_what_training_does_not_see(tmp_path):
    path = save_recipe(tmp_path)
    recipe = load(path)
    (part,) = held_out(parts_of(recipe))
    assert part.name == "held out"
    assert len(part.examples) == 6
    trained = trained_texts(recipe)
    assert not trained & set(texts([part])[0])
    assert len(trained) == 24 - 6


def trained_texts(recipe):
    """The questions in the training set of a run."""
    from surefoot.run.training_run import build

    data = build(recipe).windows.loader.order.examples
    known = tokenizer()
    found = (known.decode(data[i]["input_ids"]) for i in range(len(data)))
    return {text.split("user\n")[1].split("<|im_end|>")[0] for text in found}


def test_a_streaming_run_holds_out_rows_of_its_first_examples(tmp_path):
    path = save_recipe(tmp_path)
    save_data(
        tmp_path / "data", "more", [{"instruction": f"m{i}", "output": "x"} for i in range(9)]
    )
    stream = [
        "data.streaming=true",
        "data.val_size=5",
        "data.buffer_size=28",
        "data.cutoff_len=256",
    ]
    recipe = load(path, ["data.datasets=[sums, more]", *stream])
    codec = open_codec(recipe)
    (part,) = held_out(parts_of(recipe))
    data = open_stream(encoding_of(recipe, codec), fail)
    known = tokenizer()
    evals = (known.decode(data.evals[""][i]["input_ids"]) for i in range(len(data.evals[""])))
    questions = {text.split("user\n")[1].split("<|im_end|>")[0] for text in evals}
    assert set(texts([part])[0]) == questions
    assert len(part.examples) == len(questions) == 5
    assert not questions & {f"m{i}" for i in range(4, 9)}, "beyond the first 28"


def fail():
    raise AssertionError("all that is needed is in the cache")


def test_several_training_datasets_are_split_as_one(tmp_path):
    path = save_recipe(tmp_path)
    save_data(
        tmp_path / "data", "more", [{"instruction": f"m{i}", "output": "x"} for i in range(9)]
    )
    recipe = load(path, ["data.datasets=[sums, more]", "data.val_size=0.5"])
    (part,) = held_out(parts_of(recipe))
    assert len(part.examples) == 17
    assert not trained_texts(recipe) & set(texts([part])[0])
    (only,) = held_out(parts_of(recipe), dataset="more")
    assert texts([only])[0] == [text for text in texts([part])[0] if text.startswith("m")]


def test_eval_datasets_are_taken_whole_and_apart(tmp_path):
    path = save_recipe(tmp_path, data=NO_VAL)
    for name in ("one", "two"):
        rows = [{"instruction": f"{name}{i}", "output": "x"} for i in range(3)]
        save_data(tmp_path / "data", name, rows)
    recipe = load(path, ["data.eval_datasets=[one, two]"])
    parts = held_out(parts_of(recipe))
    assert [part.name for part in parts] == ["one", "two"]
    assert texts(parts) == [["one0", "one1", "one2"], ["two0", "two1", "two2"]]
    assert texts(held_out(parts_of(recipe), limit=2)) == [
        ["one0", "one1"],
        ["two0", "two1"],
    ]
    assert texts(held_out(parts_of(recipe), dataset="two")) == [["two0", "two1", "two2"]]


def test_training_data_is_evaluated_on_only_with_a_warning(tmp_path, monkeypatch):
    recipe = load(save_recipe(tmp_path, data=NO_VAL, train=QUIET))
    said = []
    monkeypatch.setattr("surefoot.use.evaluation.logger.warning", lambda *a: said.append(a))
    (part,) = held_out(parts_of(recipe), dataset="sums")
    assert len(part.examples) == 24
    assert "do not measure generalization" in said[0][0]


def test_rows_without_anything_to_learn_are_left_out_as_in_training(tmp_path):
    rows = [{"instruction": "x" * 200, "output": "y"}] + [
        {"instruction": f"q{i}", "output": "y"} for i in range(5)
    ]
    path = save_recipe(tmp_path, data=NO_VAL)
    save_data(tmp_path / "data", "odd", rows)
    recipe = load(path, ["data.eval_datasets=[odd]", "data.cutoff_len=64"])
    assert texts(held_out(parts_of(recipe))) == [[f"q{i}" for i in range(5)]]


def test_another_model_is_asked_the_same_questions(tmp_path):
    """A template that leaves no room for some rows does not change what is held out."""
    path = save_recipe(tmp_path)
    recipe = load(path, ["data.cutoff_len=40", "data.val_size=0.5"])
    wordy = "{{ 'x' * 1000 }}{% for m in messages %}{{ m.content }}{% endfor %}"
    model = str(save_model(tmp_path / "wordy", template=wordy))
    with pytest.raises(DataError, match="no example of 12 can be evaluated"):
        evaluate_run(recipe, ALONE, PLAINLY, model=model, progress=lambda *_: nullcontext(list))


def test_a_recipe_whose_model_is_gone_is_read_as_the_given_one(tmp_path):
    path = save_recipe(tmp_path)
    expected = texts(held_out(parts_of(load(path))))
    (tmp_path / "model").rename(tmp_path / "moved")
    recipe = load(path)
    assert texts(held_out(parts_of(recipe))) == expected


def test_nothing_to_evaluate_on_is_said_with_what_to_do(tmp_path):
    recipe = load(save_recipe(tmp_path, data=NO_VAL, train=QUIET))
    with pytest.raises(RecipeError, match=r"data\.val_size or data.eval_datasets.*--dataset"):
        held_out(parts_of(recipe))
    with pytest.raises(DataError, match=r"'sumz'.*sums"):
        held_out(parts_of(recipe), dataset="sumz")
