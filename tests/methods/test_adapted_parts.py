"""Adapters on the tower and the projector of models that read pictures: what is adapted, what PEFT
and transformers compute from the files, resume, ranks."""

import json
import re
import shutil
from dataclasses import replace

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForImageTextToText

import pictures
import ranks
import spread
import tiny
from each import some
from surefoot.errors import RecipeError
from surefoot.methods import OFT, LoRA, VeRA
from surefoot.model.isolation import use_packed
from surefoot.model.lora_layers import enable_float32_lengths, enable_fused_lora
from surefoot.model.outputs import compute, logprob_head_of
from surefoot.model.weight_matrices import adapted, layer_list
from surefoot.network._coverage import coverage, table
from surefoot.parallel.world import ALONE
from surefoot.recipe.recipe_data import open_codec
from surefoot.run.assembly import build
from surefoot.run.resolving import resolved
from surefoot.use import export

ALL = ("tower", "projector", "language")


def adapted_parts(kind, method):
    names = adapted(method.apply(pictures.model(kind)))
    return {name: pictures.part_of(kind, name) for name in names}


NONE = ("lm_head", "model.vision_tower.head.attention.out_proj")  # the last is read by its layer


def in_parts(kind, *parts):
    """Every linear layer of these parts that may have an adapter."""
    modules = pictures.model(kind).named_modules()
    linear = {n for n, m in modules if isinstance(m, torch.nn.Linear) and n not in NONE}
    return {f"{name}.weight" for name in linear if pictures.part_of(kind, f"{name}.") in parts}


@pytest.mark.parametrize("kind", some(pictures.KINDS, ["qwen2_vl", "idefics3"]))
def test_all_is_every_linear_layer_of_the_parts(kind):
    has_linear = {*ALL} - ({"projector"} if kind == "gemma3" else set())
    for parts in (("language",), ("tower",), ("tower", "language"), sorted(has_linear)):
        expected = in_parts(kind, *parts)
        for method in (LoRA(rank=2, parts=parts), OFT(block_size=4, parts=parts)):
            assert set(adapted_parts(kind, method)) == expected
    assert set(adapted_parts(kind, LoRA(rank=2))) == in_parts(kind, "language")
    assert set(adapted_parts(kind, VeRA(rank=2, parts=("tower",)))) == in_parts(kind, "tower")


QWEN3 = {
    "text_config": {**pictures.TEXT, "rope_parameters": pictures.ROPE},
    "vision_config": {
        **{"depth": 2, "hidden_size": 32, "out_hidden_size": 32, "num_heads": 4},
        **{"intermediate_size": 48, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    },
}
OF_QWEN = ("visual.merger", ("visual.pos_embed", "visual.patch_embed", "visual.blocks"))
IN_LLAMAFACTORY = {  # its table of models (0.9.5): projector, tower, and what has no adapter
    "qwen2_vl": (*OF_QWEN, ("patch_embed",)),
    "qwen3_vl": (OF_QWEN[0], (*OF_QWEN[1], "visual.deepstack_merger_list"), ("patch_embed",)),
    "llava": ("multi_modal_projector", ("vision_tower",), ()),
    "gemma3": ("multi_modal_projector", ("vision_tower",), ()),
}


@pytest.mark.parametrize("kind", IN_LLAMAFACTORY)
def test_all_is_what_llamafactory_adapts(kind):
    """Its rule for ``lora_target: all``: the last parts of the names of linear layers, without the
    projector, and then every module whose name contains one of them, but for what it excludes."""
    projector, tower, conflicts = IN_LLAMAFACTORY[kind]

    def model():
        if kind in pictures.KINDS:
            return pictures.model(kind)
        return AutoModelForImageTextToText.from_config(AutoConfig.for_model(kind, **QWEN3))

    for parts in (("language",), ("tower", "language")):
        excluded, modules = (
            (projector, *(() if "tower" in parts else tower)),
            model().named_modules(),
        )
        names = {n: m for n, m in modules if not any(word in n for word in excluded)}
        linear = {name for name, module in names.items() if isinstance(module, torch.nn.Linear)}
        leaves = {name.rpartition(".")[2] for name in linear - {*NONE}}
        by_its_rule = {
            f"{name}.weight"
            for name in names
            if any(leaf in name for leaf in leaves) and not any(word in name for word in conflicts)
        } - {f"{name}.weight" for name in NONE}
        assert set(adapted(LoRA(rank=2, parts=parts).apply(model()))) == by_its_rule


def test_a_name_that_several_parts_have_goes_to_those_of_the_recipe():
    def found(*parts, **settings):
        method = LoRA(rank=2, targets=("q_proj",), parts=parts, **settings)
        return {name.split(".")[1] for name in adapted_parts("gemma3", method)}

    assert found("language") == {"language_model"}
    assert found("tower") == {"vision_tower"}
    assert found("tower", "language") == {"vision_tower", "language_model"}
    names = adapted_parts("gemma3", LoRA(rank=2, layers=(0,), parts=("tower", "language")))
    layers = {(part, name.partition("layers.")[2][:1] or "0") for name, part in names.items()}
    assert layers == {("language", "0"), ("tower", "0"), ("tower", "1")}


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        ("qwen2_vl", {"targets": ("q_proj",)}, "in the tower, whose linear layers are fc1, fc2"),
        ("gemma3", {"targets": ("fc1",)}, "in the language, whose linear layers are down_proj"),
        ("gemma3", {"parts": ALL}, r"in the projector, without .* \(method.lora.modules_to_save"),
        ("llava", {"parts": ALL, "modules_to_save": ("projector",)}, "to adapt in the projector"),
        (
            "llava",
            {"targets": ("linear_1", "fc1")},
            "linear_1 cannot .* is of the projector, which",
        ),
        ("llava", {"targets": ("q_proj", "w9")}, "'w9' is not in the model; expected all, or some"),
        ("llava", {"modules_to_save": ("tower",)}, "no module 'tower' in the model"),
    ],
)
def test_a_part_without_a_target_is_refused(kind, settings, words):
    method = LoRA(**{"rank": 2, "parts": ("tower", "language"), **settings})
    with pytest.raises(RecipeError, match=words):
        method.apply(pictures.model(kind))


def test_parts_that_mean_nothing_are_refused():
    with pytest.raises(ValueError, match="layers are those of the language model"):
        LoRA(layers=(0,), parts=("tower",))
    with pytest.raises(ValueError, match="parts must name at least one of"):
        OFT(parts=())
    with pytest.raises(RecipeError, match=r"method\.vera\.parts: LlamaForCausalLM has no tower"):
        VeRA(parts=("tower",)).apply(tiny.model())


def test_the_layers_are_those_of_the_language_model_beside_a_larger_tower():
    model = pictures.model("llava")
    model.model.vision_tower.encoder.layers[0].wide = torch.nn.Linear(512, 512)
    assert layer_list(model) is model.model.language_model.layers


def test_the_table_shows_each_part():
    inner = pictures.model("gemma3")
    method = LoRA(rank=2, parts=("tower", "language"), modules_to_save=("projector",))
    rows = coverage(method.apply(inner), inner)
    trained = {(row.part, row.modules): row.trained for row in rows}
    by_pictures = ", by rows with more than text"
    for part, how in (("tower", f"yes, by an adapter{by_pictures}"), ("language", "yes, by an")):
        attention = {k: v for k, v in trained.items() if k[0] == part and "q_proj" in k[1]}
        assert [value.startswith(how) for value in attention.values()] == [True]
    projector = {value for (part, _), value in trained.items() if part == "projector"}
    assert projector == {f"yes{by_pictures}"}
    assert sum(row.share for row in rows) == pytest.approx(1)
    assert "  tower: mlp: fc1, fc2  " in table(rows)
    inner = pictures.model("gemma3")
    rows = coverage(LoRA(rank=2).apply(inner), inner)
    assert {r.trained for r in rows if r.part != "language"} == {"no: its part has no adapter"}


@pytest.fixture(scope="module", params=some(pictures.KINDS, ["qwen2_vl", "gemma3"]))
def kind(request):
    return request.param


EVERY = {"rank": 2, "parts": list(ALL)}
IN_FULL = {"rank": 2, "parts": ["tower", "language"], "modules_to_save": ["projector"]}


@pytest.fixture(scope="module")
def run(kind, tmp_path_factory):
    """Build a trainer of adapters on every part that has linear layers, in one folder."""
    folder = tmp_path_factory.mktemp(kind)
    base = pictures.save_model(folder / "base", kind)
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, pictures.rows(folder, 9))))

    def made(name="run", world=ALONE, resume=None, **changes):
        settings = {"optim": {"adamw": {"learning_rate": 1e-2}}, **changes}
        settings = {"method": {"lora": IN_FULL if kind == "gemma3" else EVERY}, **settings}
        settings["train"] = {"output_dir": str(folder / name), **settings.get("train", {})}
        recipe = pictures.recipe(folder, base, cutoff_len=512, **settings)
        return build(resolved(recipe), world=world, resume=resume)

    return made, folder


@pytest.fixture(scope="module")
def finished(run):
    """The network of a run of four steps."""
    made, _ = run
    trainer = made(checkpoint={"save_steps": 2, "async_save": False})
    trainer.fit()
    return trainer.policy.network


@pytest.fixture(scope="module")
def prepared(kind, run):
    """A collation, and items with no, one and two pictures."""
    _, folder = run
    recipe = pictures.recipe(folder, folder / "base", cutoff_len=512)
    codec = open_codec(recipe, folder / "base")
    return pictures.collation_of(recipe, codec), codec, pictures.items(codec, folder)


def logits(model, prepared):
    """Those of each item alone, by transformers' own forward pass."""
    collation, _, items = prepared
    model.eval()
    batches = [pictures.padded(collation).batch([item]) for item in items]
    with torch.no_grad():
        each = [model(input_ids=b.input_ids, use_cache=False, **b.media).logits for b in batches]
    return torch.cat([values[0] for values in each])


def test_peft_and_transformers_compute_what_the_run_does(kind, run, finished, prepared, tmp_path):
    _, folder = run
    finished.inner.set_attn_implementation("sdpa")
    ours = logits(finished.module, prepared)
    checkpoint = folder / "run" / "checkpoint-4"
    base = AutoModelForImageTextToText.from_pretrained(folder / "base")
    before = logits(base, prepared)
    assert (ours - before).abs().max() > 0.01
    opened = PeftModel.from_pretrained(base, checkpoint)
    close = {"atol": 2e-6 * float(before.abs().max()), "rtol": 1e-5}
    torch.testing.assert_close(logits(opened, prepared), ours, **close)
    assert adapted(opened).keys() == adapted(finished.module).keys()
    merged = AutoModelForImageTextToText.from_pretrained(export(checkpoint, tmp_path / "merged"))
    torch.testing.assert_close(logits(merged, prepared), ours, **close)
    changed = {
        pictures.part_of(kind, name)
        for (name, now), then in zip(
            merged.named_parameters(), pictures.model(kind).parameters(), strict=True
        )
        if not torch.equal(now, then)
    }
    assert changed == {*ALL}


# How vLLM renames what stands after ``base_model.model.`` (``hf_to_vllm_mapper`` of its models),
# and where its modules of each part are (``get_mm_mapping``).
RENAMED = {
    "model.language_model.": "language_model.model.",
    "model.vision_tower.": "vision_tower.",
    "model.multi_modal_projector.": "multi_modal_projector.",
}
IN_VLLM = {
    "qwen2_vl": (
        {"model.language_model.": "language_model.model.", "model.visual.": "visual."},
        {"tower": "visual.blocks.", "projector": "visual.merger.", "language": "language_model."},
    ),
    "llava": (
        RENAMED,
        {
            "tower": "vision_tower.",
            "projector": "multi_modal_projector.",
            "language": "language_model.",
        },
    ),
    "idefics3": (
        {},
        {
            "tower": "model.vision_model.",
            "projector": "model.connector.",
            "language": "model.text_model.",
        },
    ),
    "gemma3": (RENAMED, {"tower": "vision_tower.", "language": "language_model."}),
}


def test_the_names_in_files_are_those_that_vllm_reads(kind, run, finished):
    _, folder = run
    names = load_file(folder / "run" / "checkpoint-4" / "adapter_model.safetensors")
    renamed, places = IN_VLLM[kind]
    parts = set()
    for name in names:
        if kind == "gemma3" and "multi_modal_projector" in name:
            continue  # trained in full, which vLLM refuses by modules_to_save
        match = re.fullmatch(r"base_model\.model\.(.+)\.lora_[AB]\.weight", name)
        assert match, name
        part = pictures.part_of(kind, match[1] + ".")
        prefix = next((old for old in renamed if match[1].startswith(old)), "")
        module = renamed.get(prefix, "") + match[1].removeprefix(prefix)
        assert module.startswith(places[part]), module
        parts.add(part)
    assert parts == places.keys()


def test_a_resumed_run_is_bitwise_the_uninterrupted_one(run, finished):
    made, folder = run
    whole, again = folder / "run", folder / "again"
    shutil.copytree(whole / "checkpoint-2", again / "checkpoint-2")
    checkpoint = {"save_steps": 2, "async_save": False}
    made("again", resume=again / "checkpoint-2", checkpoint=checkpoint).fit()
    for path in sorted((whole / "checkpoint-4").rglob("*.safetensors")):
        values, expected = load_file(again / path.relative_to(whole)), load_file(path)
        assert values.keys() == expected.keys()
        assert all(torch.equal(values[name], expected[name]) for name in expected), path.name


@pytest.mark.proof
@pytest.mark.parametrize("kind", ["qwen2_vl", "gemma3"], indirect=True)
def test_two_ranks_with_and_without_pictures_train_as_one_does(kind, run):
    """Micro-batches of one row: most steps have a rank without a picture."""
    made, _ = run
    train = {"micro_batch_size": 1, "global_batch_size": 2}
    slow = {"optim": {"adamw": {"learning_rate": 1e-3}}, "train": train}
    sharded = {"parallel": {"dp_shard": 2}, **slow}
    alone = spread.learn(made("alone", **slow), 4)
    both = ranks.run(2, lambda world: spread.learn(made("two", world, **sharded), 4), dp_shard=2)
    assert both[0] == both[1]
    for (loss, norm), (expected_loss, expected_norm) in zip(both[0], alone, strict=True):
        assert loss == pytest.approx(expected_loss, rel=1e-4)
        assert norm == pytest.approx(expected_norm, rel=1e-3)


def test_a_rank_without_pictures_has_gradients_of_zero_in_the_tower(kind, run, prepared):
    _, folder = run
    collation, codec, items = prepared
    model = pictures.model(kind)
    use_packed(model, 200, pictures.probes(pictures.recipe(folder, folder / "base"), codec))
    LoRA(rank=2, parts=("tower", "language"), modules_to_save=("projector",)).apply(model)
    text = [item for item in items if not len(item["media"])]
    batch = collation.among(items, 2).batch(text).read().located()
    compute(model, batch, pictures.LOGPS, head=logprob_head_of(model)).logps.sum().backward()
    reached = {"tower": [], "projector": [], "language": []}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            reached[pictures.part_of(kind, name)].append(bool(parameter.grad.any()))
    assert any(reached["language"])
    assert [set(reached[part]) for part in ("tower", "projector")] == [{False}, {False}]


@pytest.mark.parametrize("kind", ["llava"], indirect=True)
def test_a_part_has_a_learning_rate_of_its_own(kind, run):
    made, _ = run
    rates = {"tower": 0, "projector": 0.5}
    optim = {"adamw": {"learning_rate": 1e-2, "learning_rates": rates}}
    trainer = made("rates", optim=optim)
    optimizer = trainer.policy.trained.at(0)
    found = {}
    for group in optimizer.param_groups:
        for name in group["names"]:
            part = pictures.part_of(kind, name.removeprefix("base_model.model."))
            found.setdefault(part, set()).add(group["lr"])
    assert found == {"tower": {0}, "projector": {5e-3}, "language": {1e-2}}
    with pytest.raises(RecipeError, match="learning_rates: 'tower' matches no trainable parameter"):
        made("refused", optim=optim, method="lora")


@pytest.mark.parametrize("kind", some(["qwen2_vl", "llava"], ["llava"]), indirect=True)
@pytest.mark.parametrize(
    "method",
    [LoRA(rank=2, rslora=True), LoRA(rank=2, dora=True), OFT(block_size=4), VeRA(rank=4)],
    ids=["rslora", "dora", "oft", "vera"],
)
def test_every_kind_of_adapter_may_be_on_every_part(kind, method, prepared, tmp_path):
    model = pictures.model(kind)
    wrapped = replace(method, parts=ALL).apply(model)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    enable_fused_lora(wrapped)
    enable_float32_lengths(wrapped)
    ours = logits(wrapped, prepared)
    wrapped.save_pretrained(tmp_path)
    opened = PeftModel.from_pretrained(pictures.model(kind), tmp_path)
    close = {"atol": 1e-5 * float(ours.abs().max()), "rtol": 1e-4}
    torch.testing.assert_close(logits(opened, prepared), ours, **close)


@pytest.mark.parametrize("kind", ["gemma3"], indirect=True)
def test_an_adapter_is_continued_on_the_parts_that_it_has(kind, run, finished):
    made, folder = run
    adapter = {"model": {"adapter": str(folder / "run" / "checkpoint-4")}}
    again = made("continued", method="lora", **adapter).policy.network
    assert adapted(again.module).keys() == adapted(finished.module).keys()
    with pytest.raises(RecipeError, match=r"parts: tower, but model.adapter adapts language, towe"):
        made("refused", method={"lora": {"parts": ["tower"]}}, **adapter)
