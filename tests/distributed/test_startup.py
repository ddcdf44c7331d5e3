"""A model that no process ever holds whole starts as the one that ``from_pretrained`` loads."""

import errno
import os
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

import folders
import ranks
import small
import tiny
from counting import Counting
from each import some
from project import Project
from spread import learn, save, writers
from surefoot.checkpoint.saving.saver import AsyncSaver
from surefoot.data.section import DataSection
from surefoot.data.store.dataset import in_memory
from surefoot.data.text.codec import Codec
from surefoot.data.training_data import TrainingData
from surefoot.errors import ModelError
from surefoot.methods import Freeze, Full, LLaMAPro, LoRA
from surefoot.model.isolation import PromptSharing, select_prompt_sharing, use_packed
from surefoot.model.loading import load_model
from surefoot.model.section import ModelSection
from surefoot.network.shard_loading import init_on_meta
from surefoot.optim._variants.adamw import AdamW
from surefoot.parallel.world import ALONE
from surefoot.recipe.recipe import Recipe, load
from surefoot.recipe.recipe_data import open_codec
from surefoot.run.assembly import build_trainer
from surefoot.run.contexts import ColumnsAhead
from surefoot.run.parts import RunParts
from surefoot.run.policy import open_policy, settle_packing
from surefoot.stages import SFT
from surefoot.storage import files
from surefoot.training.callback import Kernels
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
    tokenizer = folders.tokenizer(extra=tokens)
    codec = Codec(tokenizer, None, recipe.data)
    parts = RunParts.around(recipe, codec, folder)
    policy = open_policy(parts, world, needs_start=False)
    columns = ColumnsAhead.of(parts, TrainingData(in_memory(small.examples()), {}), world)
    group = replace(writers(world), from_first=world.from_main)
    saver = AsyncSaver(
        folder / "out", kind=policy.weights.kind, has_lock=True, writers=group, keep=3
    )
    networks = {"policy": policy}
    made = build_trainer(parts, networks, columns.joined(), saver, (), nullcontext())
    assert policy.sharing.is_proven == packing, "prompts may be shared"
    return made


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def data(tensor):
    found = whole(tensor).detach().clone().reshape(-1)
    return found.view(torch.uint8).numpy().tobytes()


def contents(policy):
    """Every parameter and buffer, whole, as (type, bytes), under all its names."""
    tensors = dict(policy.named_parameters(remove_duplicate=False)) | dict(policy.named_buffers())
    tensors = {n: t for n, t in tensors.items() if "tokens_original" not in n}  # PEFT's, to unmerge
    return {name: (t.requires_grad, t.dtype, data(t)) for name, t in tensors.items()}


def assert_starts_alike(count, folder, parallel, *cases, steps=0):
    """Processes start from what one starts from, to the bit, and learn the same, in each case."""
    cases = cases or ({},)
    expected = []
    for case in cases:
        alone = begun(ALONE, folder, **case)
        expected.append((contents(alone.policy.module), learn(alone, steps)))

    def work(world):
        for case, (values, losses) in zip(cases, expected, strict=True):
            made = begun(world, folder, **case)
            found = contents(made.policy.module)
            assert found.keys() == values.keys()
            assert [name for name in values if found[name] != values[name]] == [], case
            for ours, theirs in zip(learn(made, steps), losses, strict=True):
                assert ours == pytest.approx(theirs, abs=CLOSE, rel=CLOSE), case

    ranks.run(count, work, **parallel)


KINDS = {
    "llama": {},
    "qwen2": {},  # tied, with biases
    "qwen3": {},
    "gemma2": {},
    "phi3": {},
    "tied llama": {"tie_word_embeddings": True},
}


@pytest.mark.proof
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parallel", [{"dp_shard": 2}, {"tp": 2}], ids=str)
def test_two_start_with_the_values_of_the_files(kind, parallel, tmp_path):
    folders.save_model(tmp_path, kind.split()[-1], **KINDS[kind], **UNEVEN)
    assert_starts_alike(2, tmp_path, parallel, steps=1)


@pytest.mark.parametrize("kind", [pytest.param("llama", marks=pytest.mark.proof), "qwen2"])
def test_the_stages_of_a_pipeline_start_from_their_own_layers(kind, tmp_path):
    folders.save_model(tmp_path, kind, **KINDS[kind], **UNEVEN)
    cases = [{"packing": True}, {"method": ADAPTER}, {"method": LLaMAPro(num_new_layers=1)}]
    expected = [learn(begun(ALONE, tmp_path, **case), 2) for case in cases]

    def work(world):
        return [learn(begun(world, tmp_path, **case), 2) for case in cases]

    for found in ranks.run(2, work, pp=2):
        for ours, theirs in zip(chain(*found), chain(*expected), strict=True):
            assert ours == pytest.approx(theirs, abs=CLOSE, rel=CLOSE)


@pytest.mark.parametrize("kind", some(KINDS, ["qwen2", "gemma2"]))
def test_a_stand_in_for_one_process_has_the_values_of_the_files(kind, tmp_path):
    folders.save_model(tmp_path, kind.split()[-1], **KINDS[kind], **UNEVEN)
    section = ModelSection(path=str(tmp_path))
    for dtype in (torch.float32, torch.bfloat16, "auto"):
        expected = load_model(tmp_path, section, dtype=dtype)
        start = init_on_meta(tmp_path, section, dtype=dtype)
        policy, values = start.apply(Full().apply)
        values.fill(policy, {}, ALONE)
        assert contents(policy) == contents(expected)
        assert policy.config.to_dict() == expected.config.to_dict()
        assert policy.generation_config.to_dict() == expected.generation_config.to_dict()
        assert policy.name_or_path == expected.name_or_path


def save_mixture(folder):
    """Experts are one tensor in memory, and many in the file."""
    config = MixtralConfig(**{**tiny.SIZES, "vocab_size": 259}, num_local_experts=4)
    MixtralForCausalLM(config).save_pretrained(folder)


def test_what_is_made_of_several_tensors_is_loaded_whole(tmp_path, caplog):
    save_mixture(tmp_path)
    with caplog.at_level("INFO"):
        assert init_on_meta(tmp_path, ModelSection(path=str(tmp_path)), dtype=torch.float32) is None
    assert "every rank loads the full model before sharding" in caplog.text
    assert "experts.gate_up_proj has no tensor of its own in the files" in caplog.text


@pytest.mark.parametrize(
    "method",
    [pytest.param(Full(), marks=pytest.mark.proof), LoRA(rank=3, targets=("q_proj", "o_proj"))],
)
def test_a_mixture_is_loaded_whole_and_learns_in_parts(tmp_path, method):
    save_mixture(tmp_path)

    def work(world):
        made = begun(world, tmp_path, method=method)
        losses = learn(made, 1)
        save(made, tmp_path / "out")
        return losses

    (alone,) = learn(begun(ALONE, tmp_path, method=method), 1)
    for (ours,) in ranks.run(2, work):
        assert ours == pytest.approx(alone, abs=CLOSE, rel=CLOSE)


@pytest.mark.proof
def test_parts_of_parts_too(tmp_path):
    folders.save_model(tmp_path, "qwen2", **UNEVEN)
    assert_starts_alike(4, tmp_path, {"tp": 2}, {}, {"method": ADAPTER}, steps=1)


METHODS = [
    Freeze(num_layers=1, extra_modules=("norm",)),
    ADAPTER,
    LoRA(rank=3, dora=True),
    LoRA(rank=3, modules_to_save=("lm_head",)),
    LoRA(rank=3, targets=("q_proj", "embed_tokens"), rslora=True),
    LLaMAPro(num_new_layers=2),
]


@pytest.mark.parametrize("methods", some([METHODS, [METHODS[2], METHODS[5]]], [METHODS[2::3]]))
def test_what_a_method_adds_is_drawn_as_in_one_process(methods, tmp_path):
    folders.save_model(tmp_path, **UNEVEN)
    cases = ({"method": method} for method in methods)
    assert_starts_alike(2, tmp_path, {"dp_shard": 2}, *cases, steps=1)


def test_an_adapter_to_go_on_from_is_read(tmp_path):
    base = folders.save_model(tmp_path / "base", **UNEVEN)
    adapter = folders.save_adapter(base, tmp_path / "adapter", modules_to_save=["lm_head"])
    case = {"method": ADAPTER, "model": {"adapter": adapter}}
    assert_starts_alike(2, base, {"tp": 2}, case, steps=1)


HALF = {"dtype": "bfloat16"}


@pytest.mark.parametrize(
    "method", some([Full(), ADAPTER, METHODS[2]], [METHODS[2]]), ids=["full", "lora", "dora"]
)
def test_values_are_read_in_the_type_of_the_recipe(method, tmp_path):
    folders.save_model(tmp_path, "qwen2", dtype=torch.bfloat16, **UNEVEN)
    cases = [{"method": method, "model": model} for model in ({}, HALF)]
    assert_starts_alike(2, tmp_path, {"dp_shard": 2}, *cases)


@pytest.mark.parametrize("kind", [pytest.param("llama", marks=pytest.mark.proof), "qwen2"])
def test_new_tokens_start_at_the_mean(kind, tmp_path):
    folders.save_model(tmp_path, kind, **UNEVEN)
    assert_starts_alike(2, tmp_path, {"tp": 2}, {"tokens": ("<a>", "<b>", "<c>")})


@pytest.mark.parametrize("kind", [pytest.param("llama", marks=pytest.mark.proof), "qwen2"])
def test_the_rows_of_new_tokens_alone(kind, tmp_path):
    folders.save_model(tmp_path, kind, **UNEVEN)
    method = LoRA(rank=3, new_tokens=True)
    case = {"tokens": ("<a>", "<b>", "<c>"), "method": method}
    assert_starts_alike(2, tmp_path, {"dp_shard": 2}, case, steps=1)


@pytest.mark.proof
def test_packed_rows(tmp_path):
    folders.save_model(tmp_path, **UNEVEN)
    cases = {"packing": True}, {"packing": True, "method": ADAPTER}
    assert_starts_alike(2, tmp_path, {"tp": 2}, *cases, steps=1)


@pytest.mark.parametrize(
    "parallel", [{"dp_shard": 2}, pytest.param({"tp": 2}, marks=pytest.mark.proof)], ids=str
)
def test_adapters_in_float32_beside_a_base_in_bfloat16(parallel, tmp_path):
    folders.save_model(tmp_path, "qwen2", dtype=torch.bfloat16, **UNEVEN)
    case = {"method": ADAPTER, "model": HALF, "precision": "bf16"}
    alone = learn(begun(ALONE, tmp_path, **case), 2)

    def work(world):
        made = begun(world, tmp_path, **case)
        found = {(p.requires_grad, p.dtype) for p in made.policy.module.parameters()}
        assert found == {(True, torch.float32), (False, torch.bfloat16)}
        return learn(made, 2)

    for found in ranks.run(2, work, **parallel):
        for ours, theirs in zip(found, alone, strict=True):
            assert ours == pytest.approx(theirs, abs=5e-3, rel=5e-3)


def head(folder):
    """The bytes of a weight file before its tensors."""
    with (folder / "model.safetensors").open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


@pytest.mark.parametrize(
    ("count", "parallel"),
    [
        (2, {"dp_shard": 2}),
        (4, {"tp": 2}),
        pytest.param(2, {"dp_replicate": 2}, marks=pytest.mark.proof),
    ],
    ids=str,
)
def test_each_process_reads_what_it_holds_and_no_more(count, parallel, tmp_path, monkeypatch):
    folders.save_model(tmp_path, "qwen2", dtype=torch.bfloat16, **UNEVEN)
    numel = sum(p.numel() for p in begun(ALONE, tmp_path).policy.module.parameters())

    def work(world):
        monkeypatch.setattr(files, "os", counting := Counting(tmp_path / "model.safetensors"))
        made = begun(world, tmp_path)
        held = sum(p.to_local().numel() for p in made.policy.module.parameters())
        heads = 2 if world.is_main else 1  # one process also names what the model lacks
        assert counting.count == heads * head(tmp_path) + 2 * held  # bytes of bfloat16
        return held

    found = ranks.run(count, work, **parallel)
    copies = parallel.get("dp_replicate", 1)
    assert max(found) <= 1.05 * copies * numel / count


def test_only_what_is_left_in_the_model_is_read(tmp_path, monkeypatch):
    folders.save_model(tmp_path, **UNEVEN)
    section = ModelSection(path=str(tmp_path))
    whole = load_model(tmp_path, section, dtype=torch.float32)
    monkeypatch.setattr(files, "os", counting := Counting(tmp_path / "model.safetensors"))
    start = init_on_meta(tmp_path, section, dtype=torch.float32)
    del start.model.model.layers[0], start.model.model.embed_tokens
    policy, values = start.apply(Full().apply)
    values.fill(policy, {}, ALONE)
    held = sum(p.numel() for p in policy.parameters())
    assert counting.count == head(tmp_path) + 4 * held
    assert contents(policy.model.layers[0]) == contents(whole.model.layers[1])
    assert torch.equal(policy.lm_head.weight, whole.lm_head.weight)


def test_a_copy_of_what_was_tied_is_read_as_well(tmp_path):
    folders.save_model(tmp_path, "qwen2", **UNEVEN)
    start = init_on_meta(tmp_path, ModelSection(path=str(tmp_path)), dtype=torch.float32)
    tied = start.model.lm_head.weight
    start.model.lm_head.weight = torch.nn.Parameter(torch.empty_like(tied))
    policy, values = start.apply(Full().apply)
    values.fill(policy, {}, ALONE)
    assert policy.lm_head.weight is not policy.model.embed_tokens.weight
    assert torch.equal(policy.lm_head.weight, policy.model.embed_tokens.weight)


@pytest.mark.parametrize("differ", [False, True], ids=["equal", "other"])
def test_a_head_that_is_tied_but_stored_is_tied_if_it_is_equal(differ, tmp_path):
    folders.save_model(tmp_path, "qwen2", **UNEVEN)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + (1.0 if differ else 0.0)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert_starts_alike(2, tmp_path, {"dp_shard": 2}, steps=1)


def test_a_file_of_the_bare_model_lacks_its_prefix(tmp_path):
    folders.save_model(tmp_path, "qwen2", **UNEVEN)
    tensors = load_file(tmp_path / "model.safetensors")
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(bare, tmp_path / "model.safetensors", {"format": "pt"})
    assert_starts_alike(2, tmp_path, {"dp_shard": 2})


def test_a_model_in_several_files(tmp_path):
    folders.save_model(tmp_path, **UNEVEN)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    whole.save_pretrained(tmp_path, max_shard_size="60KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert_starts_alike(2, tmp_path, {"dp_shard": 2})


def break_it(how, path):
    tensors = load_file(path)
    if how == "missing":
        del tensors["model.norm.weight"]
    elif how == "unexpected":
        tensors["model.odd.weight"] = torch.zeros(3)
    else:
        tensors["model.norm.weight"] = torch.zeros(3)
    save_file(tensors, path, {"format": "pt"})


@pytest.mark.parametrize("how", ["missing", "unexpected", "mismatched"])
def test_other_tensors_than_the_model_s_are_named_by_every_process(how, tmp_path):
    folders.save_model(tmp_path, **UNEVEN)
    break_it(how, tmp_path / "model.safetensors")

    def work(world):
        with pytest.raises(ModelError, match=rf"1 tensor {how} \(.*model\.(norm|odd)\.weight"):
            begun(world, tmp_path)

    ranks.run(2, work)


def test_a_truncated_file_is_named_by_every_process(tmp_path):
    folders.save_model(tmp_path, **UNEVEN)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])

    def work(world):
        with pytest.raises(ModelError, match="damaged or truncated"):
            begun(world, tmp_path)

    ranks.run(2, work)


class Failing(Counting):
    """``os`` on a disk that gives the head of a file only."""

    def preadv(self, descriptor, buffers, offset):
        if descriptor in self.opened and offset > 8:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().preadv(descriptor, buffers, offset)


def test_a_disk_that_fails_one_process_is_an_error_in_all(tmp_path, monkeypatch):
    folders.save_model(tmp_path, **UNEVEN)

    def work(world):
        if world.rank == 1:
            monkeypatch.setattr(files, "os", Failing(tmp_path))
        with pytest.raises(ModelError, match=r"model\.safetensors.*input/output error"):
            begun(world, tmp_path)

    ranks.run(2, work)


@pytest.mark.parametrize("known", [None, True, False])
def test_a_run_that_goes_on_shares_prompts_as_it_did(known):
    model = tiny.model()
    for is_proven in (True, False):
        use_packed(model)
        sharing = PromptSharing(is_proven)
        assert select_prompt_sharing(sharing, model, known) == (
            is_proven if known is None else known
        )
    assert not select_prompt_sharing(
        PromptSharing(), tiny.model(), known
    )  # not in a kernel of another


def test_prompts_are_shared_on_all_ranks_or_on_none(tmp_path):
    """Each rank tries it with its own processor, and examples are dealt by it."""
    recipe = load(Project(tmp_path).recipe, ["data.packing=true", "model.attention=sdpa"])
    base = Path(recipe.model.path)
    parts = RunParts.around(recipe, open_codec(recipe, base), base)

    def settled(world):
        policy = SimpleNamespace(
            awaits_values=False, inner=tiny.model(), sharing=PromptSharing(world.rank == 0)
        )
        trainer = SimpleNamespace(state=SimpleNamespace(kernels=Kernels()), world=world)
        settle_packing(parts, trainer, policy)
        return policy.sharing.is_proven, trainer.state.kernels.shared_prompts

    assert ranks.run(2, settled, dp_replicate=2) == [(False, False)] * 2
