"""What ranks would refuse when they open a model together is refused before: one rank alone that
finds it leaves the others waiting."""

import pytest

import ranks
from each import some
from surefoot.errors import ModelError, RecipeError
from surefoot.methods import OFT, Full, LoRA, VeRA
from surefoot.model.section import ModelSection
from surefoot.network.draft import NetworkOptions
from surefoot.network.early import refuse_early
from surefoot.network.open import open_network
from surefoot.optim._variants.adamw import AdamW
from surefoot.parallel.section import ParallelSection
from zoo import architectures

MESHES = {
    "tp": {"tp": 2},
    "sequence_parallel": {"tp": 2, "sequence_parallel": True},
    "pp": {"pp": 2},
    "dp_shard": {"dp_shard": 2},
    "cp": {"dp_shard": 2, "cp": 2},
}
METHODS = {
    "full": Full(),
    "lora": LoRA(),
    "dora": LoRA(dora=True),
    "embeddings": LoRA(targets=("embed_tokens",)),
    "saved": LoRA(modules_to_save=("lm_head",)),
    "vera": VeRA(),
    "oft": OFT(),
}


def options_of(method, mesh):
    """A network on a mesh of two ranks; they can share rows that are packed."""
    parallel = ParallelSection(num_processes=2, **mesh)
    return NetworkOptions(method=method, parallel=parallel, packing=parallel.cp > 1)


def is_let_through(folder, method, mesh, tmp_path):
    """Whether what is known early lets a recipe pass."""
    try:
        refuse_early(
            folder,
            ModelSection(path=str(folder)),
            options_of(method, mesh),
            AdamW(learning_rate=1e-3),
            num_processes=2,
            output_dir=tmp_path / "run",
        )
    except (RecipeError, ModelError):
        return False
    return True


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("kind", some([*architectures.SETTINGS], ["qwen3_moe"]))
def test_what_is_let_through_early_opens_on_ranks(kind, mesh, tmp_path):
    folder = tmp_path / "model"
    architectures.build(kind).save_pretrained(folder)
    passed = {
        name: method
        for name, method in METHODS.items()
        if is_let_through(folder, method, MESHES[mesh], tmp_path)
    }

    def work(world):
        section, refused = ModelSection(path=str(folder)), {}
        for name, method in passed.items():
            try:
                open_network(folder, section, None, world, options_of(method, MESHES[mesh]))
            except (RecipeError, ModelError) as error:
                refused[name] = str(error)
            world.wait()
        return refused

    first, second = ranks.run(2, work, **MESHES[mesh])
    assert first == second
    if "cp" in MESHES[mesh]:  # that attention needs masks of rows is found by values, on all ranks
        first = {name: text for name, text in first.items() if "masks of rows" not in text}
    assert not first
