"""Tiles and RMSNorm of long rows on two ranks that shard the weights, against one process that has
neither: its rows are short for it."""

import pytest

import folders
import ranks
from each import some
from spread import learn
from surefoot.methods import Full, LoRA
from surefoot.model import rms_norm, token_tiles
from surefoot.parallel.world import ALONE
from test_startup import begun

CLOSE = 1e-5
TILE, ELEMENTS = 4, 64  # shorter than the rows, which have two tiles and more
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.mark.parametrize("packing", some([True, False], [True]))
@pytest.mark.parametrize("method", [Full(), LoRA(rank=2)], ids=["full", "lora"])
def test_two_shards_learn_in_tiles_what_one_process_does_of_whole_rows(method, packing, tmp_path):
    known = folders.tokenizer()
    sizes = {"vocab_size": len(known), "eos_token_id": known.eos_token_id}
    folders.save_model(tmp_path, "qwen3", num_hidden_layers=2, **sizes)
    known.save_pretrained(tmp_path)
    expected = learn(begun(ALONE, tmp_path, method=method, packing=packing), 2)

    def work(world):
        model, tokens, normed = {"gradient_checkpointing": "full"}, [], []
        apply = rms_norm._RMSNorm.apply
        with pytest.MonkeyPatch.context() as patch:  # the ranks of other tests are the same
            patch.setattr(token_tiles, "TILE", TILE)
            patch.setattr(rms_norm, "_MOST_ON_CPU", ELEMENTS)
            noted = lambda *args: (normed.append(1), apply(*args))[1]  # noqa: E731
            patch.setattr(rms_norm._RMSNorm, "apply", noted)
            made = begun(world, tmp_path, method=method, packing=packing, model=model)
            layer = made.policy.network.inner.model.layers[1]
            layer.mlp.act_fn.register_forward_hook(lambda _, x, y: tokens.append(y.shape[-2]))
            return learn(made, 2), max(tokens), len(normed)

    for found, most, num_normed in ranks.run(2, work, dp_shard=2):
        assert most == TILE
        assert num_normed
        for ours, theirs in zip(found, expected, strict=True):
            assert ours == pytest.approx(theirs, abs=CLOSE, rel=CLOSE)
