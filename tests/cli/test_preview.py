"""The preview command: what is learnt can be seen, and nothing that is left out goes unsaid."""

import io
import json

import pytest
from rich.console import Console

import commands
from folders import save_data, save_recipe
from project import Project
from surefoot.cli.data import histogram, show
from surefoot.data.text.preview import PreviewExample, RenderedExample, TextSpan
from surefoot.use.data_check.figures import DatasetFigures, num_limited

run, ok, refused = commands.of("preview")

LONG = "long " * 40


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """A project whose rows are short, long, and of no use."""
    folder = tmp_path_factory.mktemp("project")
    data = {"cutoff_len": 100, "val_size": 0.0}
    path = save_recipe(folder, data=data, train={"eval_steps": None})
    rows = [
        {"instruction": "1+1?", "output": "2"},
        {"instruction": "Tell more", "output": LONG},
        {"instruction": LONG, "output": "no"},
        {"instruction": "what?", "output": 7.5},
        {"instruction": "And [bold]1+2[/bold]?", "output": "3", "score": 0.5},
    ]
    save_data(folder / "data", rows=rows)
    save_data(folder / "data", "other")
    return path


def test_what_is_learnt_stands_between_marks(recipe):
    shown = ok(recipe, "-n", 1)
    assert "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n[[2<|im_end|>]]\n" in shown
    assert "── sums:0: 26 tokens, 2 trained" in shown
    assert "[[ ]]: trained; everything else is masked" in shown
    assert "── sums:1" not in shown


def test_what_is_cut_left_out_or_broken_is_said_with_the_reason(recipe):
    out = run(recipe, "-n", 5).stdout
    assert "── sums:1: 100 tokens, truncated from 230, " in out
    assert "── sums:2: dropped: the prompt leaves no room for a response" in out
    assert "5 rows, 3 sequences" in out
    assert "rows that cannot be read: 1 (sums:3: " in out
    assert "examples that are dropped: the prompt leaves no room" in out
    assert "examples that are truncated to data.cutoff_len: 1 (sums:1)" in out
    assert "[bold]1+2[/bold]?" in out, "a dataset's text is never markup"


def test_one_example_is_one_that_is_trained_on(recipe):
    swapped = json.loads((recipe.parent / "data" / "sums.json").read_text())
    save_data(recipe.parent / "data", "swapped", rows=[swapped[2], *swapped[:2]])
    out = run(recipe, "--dataset", "swapped", "-n", 1).stdout
    assert "── swapped:1: 26 tokens" in out
    assert "── swapped:0" not in out


def test_the_histogram_shows_where_the_cut_is(recipe):
    out = run(recipe, "-n", 0).stdout
    assert "longest 230" in out
    assert "data.cutoff_len 100" in out
    assert "[[" not in out
    enough = run(recipe, "data.cutoff_len=250", "-n", 0).stdout
    assert "no sequence is longer than data.cutoff_len 250" in enough
    assert "cut to" not in enough


def test_one_dataset_can_be_asked_for(recipe):
    out = run(recipe, "--dataset", "other").stdout
    assert "other:0" in out
    assert "sums:0" not in out
    assert "did you mean" in refused(recipe, "--dataset", "othr")


def test_json_holds_all_of_it(recipe):
    found = json.loads(run(recipe, "--json", "-n", 2).stdout)
    assert found["cutoff_len"] == 100
    (sums,) = found["datasets"]
    assert (sums["name"], sums["rows"], sums["all_rows"]) == ("sums", 5, True)
    assert (sums["items"], sums["cut"]["count"], sums["broken"]["count"]) == (3, 1, 1)
    reason = "the prompt leaves no room for a response within data.cutoff_len"
    assert sums["dropped"] == {reason: {"count": 1, "rows": ["sums:2"]}}
    assert sum(sums["lengths"].values()) == 4
    first, second = sums["shown"]
    parts = first["items"][0]["parts"]
    assert all(part.pop("answer") is None and part.pop("picture") == "" for part in parts)
    assert parts == [
        {"text": "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n", "learnt": False},
        {"text": "2<|im_end|>", "learnt": True},
        {"text": "\n", "learnt": False},
    ]
    assert (second["cut"], second["tokens"], second["items"][0]["tokens"]) == (True, 230, 100)


def test_plain_text_is_learnt_as_a_whole(recipe):
    found = json.loads(run(recipe, "stage=pt", "--json", "-n", 1).stdout)
    (sums,) = found["datasets"]
    ((part,),) = [item["parts"] for item in sums["shown"][0]["items"]]
    assert part["learnt"]
    assert sums["cut"]["count"] == 0


def test_the_page_needs_no_other_file_and_no_text_is_markup(tmp_path):
    path = save_recipe(tmp_path, data={"val_size": 0.0}, train={"eval_steps": None})
    rows = [{"instruction": "<script>alert(1)</script>", "output": "<b>no</b>"}]
    save_data(tmp_path / "data", rows=rows)
    page = tmp_path / "out" / "page.html"
    ok(path, "--html", page)
    text = page.read_text()
    assert text.startswith("<!doctype html>")
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "<mark>&lt;b&gt;no&lt;/b&gt;&lt;|im_end|&gt;" in text
    assert not any(word in text for word in ("<script", "http", "src="))
    assert "is a folder" in refused(path, "--html", tmp_path)


def test_a_wrong_recipe_is_an_error_without_a_traceback(recipe):
    assert "did you mean chatml?" in refused(recipe, "data.template=chatmll")


def test_on_a_terminal_what_is_learnt_is_green():
    spans = [TextSpan("question ", False), TextSpan("answer", True), TextSpan("\x1b[2J", True)]
    items = [RenderedExample(spans, 5, 2)]
    shown = [PreviewExample("sums:0", 5, False, None, items)]
    figures = DatasetFigures("sums", rows=1, shown=shown)
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard")
    show(console, figures, 10)
    out = console.file.getvalue()
    assert "\x1b[1;32manswer\x1b[0m" in out
    assert "\x1b[2mquestion \x1b[0m" in out
    assert "[[" not in out
    assert r"\u001b[2J" in out


@pytest.mark.parametrize(("lengths", "cutoff"), [([1], 4), ([5, 5, 5], 4), (range(1, 400), 64)])
def test_every_length_is_in_one_bar(lengths, cutoff):
    first, *bars = histogram(list(lengths), cutoff)
    assert f"longest {max(lengths)}" in first
    counts = [int(line.rsplit(" ", 1)[1]) for line in bars if " to " in line]
    assert sum(counts) == len(lengths)
    below = [c for c, line in zip(counts, bars, strict=False) if " to " in line]
    assert len(below) <= 16
    if max(lengths) > cutoff:
        marked = next(i for i, line in enumerate(bars) if "cutoff_len" in line)
        assert sum(counts[:marked]) == sum(length <= cutoff for length in lengths)


def test_no_lengths_make_no_histogram():
    assert list(histogram([], 10)) == []


def test_of_a_pair_both_answers_are_shown(tmp_path):
    made = Project(tmp_path, stage="dpo", data={"datasets": ["pairs"]})
    out = run(made.recipe, "-n", 1).stdout
    assert "user\nWhat is 0 plus 0?<|im_end|>" in out
    assert out.count("What is 0 plus 0?") == 1
    assert (
        "assistant\nchosen: [[It is 0.<|im_end|>]]\nrejected: [[It is 1, said the hen.<|im_end|>]]"
        in out
    )
    (pairs,) = json.loads(run(made.recipe, "--json", "-n", 1).stdout)["datasets"]
    (item,) = pairs["shown"][0]["items"]
    answers = {part["answer"]: part["text"] for part in item["parts"] if part["learnt"]}
    assert answers == {
        "chosen": "It is 0.<|im_end|>",
        "rejected": "It is 1, said the hen.<|im_end|>",
    }


def test_a_reward_model_has_json_too(tmp_path):
    made = Project(tmp_path, stage="rm", data={"datasets": ["pairs"]})
    (pairs,) = json.loads(run(made.recipe, "--json", "-n", 1).stdout)["datasets"]
    (item,) = pairs["shown"][0]["items"]
    assert [part["learnt"] for part in item["parts"]] == [False, True, True]


def test_a_long_tail_has_bars_of_its_own():
    lines = list(histogram([10] * 50 + [1_000, 3_000, 9_000], 100))
    assert [line.split(" to ")[0].strip() for line in lines if line.endswith(" 1")] == [
        "801",
        "1,601",
        "6,401",
    ]


def test_of_a_pair_the_length_is_that_of_the_prompt_with_its_longer_response():
    pair = {"input_ids": [0] * 60, "labels": [0] * 60, "lengths": [10, 20, 30]}
    assert num_limited(pair) == 40


def test_columns_that_nothing_reads_are_named(recipe):
    done = run(recipe, "-n", 0)
    assert "  keys that nothing reads: 1 (score: 1 row, " in done.stdout
    (stats,) = json.loads(run(recipe, "--json").stdout)["datasets"]
    assert list(stats["unread"]) == ["score"]
