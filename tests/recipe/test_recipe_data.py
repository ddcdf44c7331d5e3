"""What a recipe's data is cached under."""

import json
from dataclasses import replace

import pytest

from folders import save_data, save_recipe
from surefoot.data.training_data import prepare
from surefoot.errors import TemplateError
from surefoot.model.loading import resolve
from surefoot.recipe.recipe import load
from surefoot.recipe.recipe_data import encoding_of, open_codec
from surefoot.stages import SFT, STAGES
from surefoot.training.stage import Stage

NOT_HELD = ["data.val_size=0", "train.eval_steps=null"]


@pytest.fixture
def recipe(tmp_path):
    path = save_recipe(tmp_path)
    rows = [{"instruction": "1+1?", "output": str(n), "label": n == 2} for n in range(5)]
    save_data(tmp_path / "data", rows=rows)
    info = {"sums": {"file_name": "sums.json", "columns": {"kto_tag": "label"}}}
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(info))
    return load(path, NOT_HELD)


def test_what_sft_cached_before_it_dropped_undesirable_rows_is_not_used(recipe, monkeypatch):
    codec = open_codec(recipe, resolve(recipe.model))
    with monkeypatch.context() as earlier:
        earlier.setattr(SFT, "encoding", "")
        earlier.setattr(SFT, "encode", lambda _, examples, codec: codec.encode_chats(examples))
        assert len(prepare(encoding_of(recipe, codec)).train) == 5
    assert len(prepare(encoding_of(recipe, codec)).train) == 1


def test_a_wrong_template_and_wrong_data_are_said_at_once(recipe, tmp_path):
    (tmp_path / "data" / "sums.json").unlink()
    wrong = replace(recipe, data=replace(recipe.data, template="chatnl"))
    with pytest.raises(TemplateError) as caught:
        open_codec(wrong, resolve(wrong.model))
    template, data = str(caught.value).splitlines()
    assert "chatnl" in template
    assert "no file or folder" in data


def test_what_other_stages_cached_is_used():
    changed = {name for name, stage in STAGES.items() if stage.encoding is not Stage.encoding}
    assert changed == {"rm", "sft", "grpo", "ppo", "distill", "classify"}
