"""LLaMA-Factory's ``do_predict`` and ``do_eval``: its files and metrics in its output_dir."""

import importlib.util
import json
import math
from pathlib import Path

import pytest

import commands
from folders import save_adapter
from project import model_folder, rows
from surefoot.recipe.recipe import convert, load_converted

EXAMPLES = json.loads((Path(__file__).parent / "llamafactory" / "examples.json").read_text())
FILE = "generated_predictions.jsonl"
NEEDED = ("jieba", "rouge_chinese")
needs_metrics = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, NEEDED)), reason="the extra metrics is not installed"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("predict")
    model_folder(found / "model", max_position_embeddings=2048, initializer_range=0.3)
    save_adapter(found / "model", found / "adapter")
    (found / "data").mkdir()
    names = ("identity", "alpaca_en_demo")
    for name in names:
        (found / "data" / f"{name}.json").write_text(json.dumps(rows(4)))
    info = {name: {"file_name": f"{name}.json"} for name in names}
    (found / "data" / "dataset_info.json").write_text(json.dumps(info))
    (found / "predict.yaml").write_text(
        EXAMPLES["examples/extras/nlg_eval/llama3_lora_predict.yaml"]
    )
    return found


def words(folder, out):
    changed = [f"model_name_or_path={folder}/model", f"adapter_name_or_path={folder}/adapter"]
    changed += [f"dataset_dir={folder}/data", f"output_dir={out}", "template=chatml"]
    return [folder / "predict.yaml", *changed, "max_samples=3", "max_new_tokens=5"]


def test_generation_has_their_defaults(folder, tmp_path):
    """They sample, where a recipe without a section generate is greedy."""
    given = [*map(str, words(folder, tmp_path)[:-1])]
    converted = convert(given)
    section = load_converted(converted).generate
    assert (section.do_sample, section.temperature, section.top_p) == (True, 0.95, 0.7)
    assert (section.top_k, section.max_new_tokens) == (50, 1024)
    assert not converted.extras.trains
    after = converted.extras.after
    assert after.parts == ("predict",) and after.with_generate


@needs_metrics
def test_their_predict_example_writes_their_files_and_uses_those_of_an_earlier_attempt(
    folder, tmp_path
):
    from surefoot.use.run_evaluation import similarity

    out = commands.ok("train", *words(folder, tmp_path / "out"))
    predictions = (tmp_path / "out" / FILE).read_bytes()
    found = list(map(json.loads, predictions.splitlines()))
    assert len(found) == 6  # max_samples of each dataset
    assert found[0].keys() == {"prompt", "predict", "label"}
    assert found[0]["label"] == "It is 0." and found[0]["prompt"].endswith("assistant\n")
    assert not any("<|" in row["predict"] + row["label"] for row in found)
    metrics = json.loads((tmp_path / "out/predict_results.json").read_text())
    expected = similarity([row["predict"] for row in found], [row["label"] for row in found])
    assert {name: metrics[f"predict_{name}"] for name in expected} == expected
    assert metrics.keys() >= {"predict_runtime", "predict_samples_per_second"}
    assert "predict_bleu-4: " in out and not list((tmp_path / "out").glob("*.part"))
    commands.ok("train", *words(folder, tmp_path / "out"))  # their overwrite_output_dir
    assert (tmp_path / "out" / FILE).read_bytes() == predictions


def written(folder, path, **values):
    """A file of theirs, of a model and rows of ``folder``."""
    content = {
        "model_name_or_path": f"{folder}/model",
        "dataset_dir": f"{folder}/data",
        "output_dir": f"{path.parent}/out",
        "stage": "sft",
        "template": "chatml",
        "do_eval": True,
        **values,
    }
    path.write_text(json.dumps(content))
    return path


def test_an_evaluation_without_training_writes_their_file(folder, tmp_path):
    given = {"finetuning_type": "full", "eval_dataset": "identity"}
    path = written(folder, tmp_path / "eval.yaml", **given)
    done = commands.run("train", path)
    assert done.exit_code == 0, done.output
    metrics = json.loads((tmp_path / "out/eval_results.json").read_text())
    assert math.exp(metrics["eval_loss"]) == pytest.approx(metrics["eval_perplexity"])
    assert "without effect here: do_eval" not in done.stderr
    (tmp_path / "out/eval_results.json").unlink()
    commands.ok("eval", path)
    again = json.loads((tmp_path / "out/eval_results.json").read_text())
    assert again["eval_loss"] == metrics["eval_loss"]


def test_a_training_is_evaluated_at_its_end(folder, tmp_path):
    given = {"do_train": True, "finetuning_type": "lora", "dataset": "identity"}
    path = written(folder, tmp_path / "both.yaml", **given, val_size=2, max_steps=1)
    commands.ok("train", path)
    assert json.loads((tmp_path / "out/eval_results.json").read_text())["eval_loss"] > 0
