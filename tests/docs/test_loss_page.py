"""The page about the loss: what it quotes is what the commands print of the same mistake."""

import json
import shutil

from click.testing import CliRunner
from pages import ROOT, blocks

from surefoot.cli.main import main

PAGE = ROOT / "docs" / "how-to" / "loss.md"


def test_a_wrong_column_is_seen_before_training(tmp_path, monkeypatch):
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    info = tmp_path / "examples" / "data" / "dataset_info.json"
    entry = {"file_name": "orders_train.jsonl", "columns": {"response": "instruction"}}
    info.write_text(json.dumps({"wrong_column": entry}))
    monkeypatch.chdir(tmp_path)
    recipe = ["examples/quickstart.yaml", "data.datasets=[wrong_column]", "data.eval_datasets=[]"]
    recipe += ["train.eval_epoch=false", "data.max_samples=300"]

    checked = CliRunner().invoke(main, ["data", "check", *recipe])
    assert checked.exit_code == 1, checked.output
    (quoted,) = [block.text for block in blocks(PAGE, "text") if block.title == "data check"]
    assert quoted in checked.output

    shown = CliRunner().invoke(main, ["preview", *recipe]).output
    marked = "[[Write this order as a record.<|im_end|>]]"
    assert marked in PAGE.read_text()
    assert shown.count(marked) > 2
