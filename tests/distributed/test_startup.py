"""A model that no process ever holds whole starts as the one that ``from_pretrained`` loads."""

import pytest
import torch
from torch.distributed.tensor import DTensor

import folders
import ranks
import small
from spread import learn
from surefoot.build import assemble, build_policy
from surefoot.checkpoint.section import CheckpointSection
from surefoot.data.prepare import Prepared
from surefoot.data.report import Report
from surefoot.data.section import DataSection
from surefoot.methods.freeze import Freeze
from surefoot.methods.full import Full
from surefoot.methods.lora import LoRA
from surefoot.model import attention
from surefoot.model.section import ModelSection
from surefoot.optim.adamw import AdamW
from surefoot.parallel.world import ALONE
from surefoot.recipe.recipe import Recipe
from surefoot.stages.sft import SFT
from surefoot.training.saver import Saver
from surefoot.training.section import TrainSection

UNEVEN = {"intermediate_size": 130, "num_hidden_layers": 2}  # and 259 tokens
CLOSE = 1e-5  # of mean losses and of gradient norms: float32 sums in another order
ADAPTER = LoRA(rank=3, alpha=8.0)


def begun(world, folder, *, method=None, model=None, tokens=(), packing=False, precision="fp32"):
    """The trainer of the model in ``folder``, at its start."""
    recipe = Recipe(
        model=ModelSection(path=str(folder), **(model or {})),
        data=DataSection(datasets=("unused",), packing=packing),
        method=method or Full(),
        stage=SFT(),
        train=TrainSection(
            output_dir=folder / "out",
            max_steps=4,
            global_batch_size=4,
            micro_batch_size=2,
            precision=precision,
        ),
        optim=AdamW(learning_rate=5e-3),
    )
    policy = build_policy(recipe, folder, folders.tokenizer(extra=tokens), world)
    assert (policy.values is None) == (world is ALONE)
    saver = Saver(
        output_dir=folder / "out",
        section=CheckpointSection(),
        kind=recipe.method.kind,
        companions={},
        steps={},
        world=world,
    )
    made = assemble(recipe, policy, Prepared(small.examples(), {}, Report(())), saver, world)
    if packing and policy.values is not None:
        attention.check_packed(policy.model)
    return made


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def data(tensor):
    found = whole(tensor).detach().clone().reshape(-1)
    return found.view(torch.uint8).numpy().tobytes()


def everything(made):
    """Every parameter and buffer of the policy, whole, as (type, bytes), under all its names."""
    policy = made.models.policy
    tensors = dict(policy.named_parameters(remove_duplicate=False)) | dict(policy.named_buffers())
    return {name: (t.requires_grad, t.dtype, data(t)) for name, t in tensors.items()}


def assert_starts_alike(count, folder, steps=0, parallel=None, **settings):
    """Processes start from what one starts from, to the bit, and learn the same."""
    alone = begun(ALONE, folder, **settings)
    expected = everything(alone)
    losses = learn(alone, steps)

    def work(world):
        made = begun(world, folder, **settings)
        found = everything(made)
        assert found.keys() == expected.keys()
        assert [name for name in expected if found[name] != expected[name]] == []
        return learn(made, steps)

    for found in ranks.run(count, work, **(parallel or {})):
        for ours, theirs in zip(found, losses, strict=True):
            assert ours == pytest.approx(theirs, abs=CLOSE, rel=CLOSE)


KINDS = {
    "llama": {},
    "qwen2": {},  # tied, with biases
    "qwen3": {},
    "gemma2": {},
    "phi3": {},
    "tied llama": {"tie_word_embeddings": True},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parallel", [{"dp_shard": 2}, {"tp": 2}], ids=str)
def test_two_start_with_the_values_of_the_files(kind, parallel, tmp_path):
    folders.save_model(tmp_path, kind.split()[-1], **KINDS[kind], **UNEVEN)
    assert_starts_alike(2, tmp_path, 1, parallel)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_parts_of_parts_too(kind, tmp_path):
    folders.save_model(tmp_path, kind, **UNEVEN)
    assert_starts_alike(4, tmp_path, 1, {"tp": 2, "dp_shard": 2})


METHODS = {
    "freeze": Freeze(num_layers=1, extra_modules=("norm",)),
    "lora": ADAPTER,
    "dora": LoRA(rank=3, dora=True),
    "lora with a head": LoRA(rank=3, modules_to_save=("lm_head",)),
    "lora with embeddings": LoRA(rank=3, targets=("q_proj", "embed_tokens"), rslora=True),
}


@pytest.mark.parametrize("method", METHODS)
def test_what_a_method_adds_is_drawn_as_in_one_process(method, tmp_path):
    folders.save_model(tmp_path, **UNEVEN)
    assert_starts_alike(2, tmp_path, 1, {"dp_shard": 2}, method=METHODS[method])


def test_an_adapter_is_drawn_alike_beside_parts_of_parts(tmp_path):
    folders.save_model(tmp_path, "qwen2", **UNEVEN)
    assert_starts_alike(4, tmp_path, 1, {"tp": 2}, method=ADAPTER)


def test_an_adapter_to_go_on_from_is_read(tmp_path):
    base = folders.save_model(tmp_path / "base", **UNEVEN)
    adapter = folders.save_adapter(base, tmp_path / "adapter", modules_to_save=["lm_head"])
    model = {"adapter": adapter}
    assert_starts_alike(2, base, 1, {"tp": 2}, method=ADAPTER, model=model)
    assert_starts_alike(2, base, 1, {"dp_shard": 2}, method=ADAPTER, model=model)


@pytest.mark.parametrize("method", [Full(), ADAPTER, METHODS["dora"]], ids=["full", "lora", "dora"])
def test_values_are_read_in_the_type_of_the_recipe(method, tmp_path):
    folders.save_model(tmp_path, "qwen2", dtype=torch.bfloat16, **UNEVEN)
    assert_starts_alike(2, tmp_path, 0, {"dp_shard": 2}, method=method)
    half = {"dtype": "bfloat16"}
    assert_starts_alike(2, tmp_path, 0, {"dp_shard": 2}, method=method, model=half)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_new_tokens_start_at_the_mean(kind, tmp_path):
    folders.save_model(tmp_path, kind, **UNEVEN)
    assert_starts_alike(2, tmp_path, 1, {"tp": 2}, tokens=("<a>", "<b>", "<c>"))


def test_packed_rows(tmp_path):
    folders.save_model(tmp_path, **UNEVEN)
    assert_starts_alike(2, tmp_path, 1, {"dp_shard": 2}, packing=True)
    assert_starts_alike(2, tmp_path, 1, {"tp": 2}, packing=True, method=ADAPTER)
