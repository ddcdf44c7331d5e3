"""The encode command fills the cache, and says what became of the rows."""

import pytest
from click.testing import CliRunner

from folders import save_data, save_recipe
from surefoot.cli.main import main
from surefoot.data.training_data import find, open_stream
from surefoot.model.loading import resolve
from surefoot.recipe.recipe import load
from surefoot.recipe.recipe_data import build_codec, encoding_of

NOT_HELD = ["data.val_size=0", "train.eval_steps=null"]


@pytest.mark.parametrize("streaming", ["false", "true"])
def test_what_is_encoded_is_found_by_training(tmp_path, streaming):
    path = save_recipe(tmp_path)
    rows = [{"instruction": "1+1?", "output": "2"}, {"instruction": "what?", "output": 7.5}]
    save_data(tmp_path / "data", "few", rows)
    settings = ["data.datasets=[sums, few]", f"data.streaming={streaming}", *NOT_HELD]
    done = CliRunner().invoke(main, ["encode", str(path), *settings])
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0].startswith("sums: 24 rows, 24 examples, ")
    assert lines[1].startswith("few: 2 rows, 1 example, ")
    assert lines[2] == "few: broken rows: 1"
    recipe = load(path, settings)
    codec = build_codec(recipe, resolve(recipe.model))
    if streaming == "true":
        assert open_stream(encoding_of(recipe, codec)).train.length == 25
    else:
        assert len(find(encoding_of(recipe, codec)).train) == 25
