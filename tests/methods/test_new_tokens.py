"""LoRA that also trains the embeddings of new tokens: their rows alone, tied or not."""

import shutil

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import ranks
import tiny
from each import some
from project import Project, assert_same, checkpoints, final_weights, losses
from surefoot.data.text.templates import bundled
from surefoot.errors import RecipeError
from surefoot.methods import LoRA
from surefoot.model.expansion import note_new_tokens
from surefoot.recipe.recipe import load
from surefoot.recipe.recipe_data import build_codec
from surefoot.run.assembly import build
from surefoot.use import export, open_model

PLAIN = {"lora": {"rank": 2}}
NEW = ["<plus>", "<hen>"]
MODEL = {"path": "model", "new_special_tokens": NEW}
LORA = {"lora": {"rank": 2, "new_tokens": True}}
TIED = "ignore:Model has .tie_word_embeddings=True. and a tied layer:UserWarning"  # PEFT's
EXPECTED = {"llama": 2, "qwen2": 1}  # matrices with rows of their own; qwen2's are tied


@pytest.fixture(scope="module", params=some(EXPECTED, ["qwen2"]))
def run(request, tmp_path_factory):
    """A kind of model, the project, and its trainer after a run of 4 steps."""
    folder = tmp_path_factory.mktemp("project")
    project = Project(folder, request.param, model=MODEL, method=LORA, train={"max_steps": 4})
    trainer = build(load(project.recipe, ["checkpoint.save_steps=2"]))
    trainer.fit()
    return request.param, project, trainer


def ids_in(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return torch.tensor([[70, *tokenizer.convert_tokens_to_ids(NEW), 71, 72]]), len(tokenizer)


def opened_by_peft(project, folder):
    """PEFT's own model of a checkpoint; new rows of the base are anything."""
    base = AutoModelForCausalLM.from_pretrained(project.folder / "model")
    base.resize_token_embeddings(ids_in(folder)[1], mean_resizing=False)
    return PeftModel.from_pretrained(base, folder).eval()


@torch.no_grad()
def test_peft_opens_the_checkpoint_with_equal_logits(run):
    _, project, trainer = run
    newest = checkpoints(project.run)[-1]
    ids, _ = ids_in(newest)
    found = opened_by_peft(project, newest)(input_ids=ids).logits
    ours = trainer.policy.module.eval()(input_ids=ids).logits
    assert torch.equal(found, ours)
    assert torch.equal(open_model(project.run).network.module(input_ids=ids).logits, ours)


def test_only_their_rows_are_trained_and_saved(run):
    kind, project, trainer = run
    stored = load_file(checkpoints(project.run)[-1] / "adapter_model.safetensors")
    rows = {name: t for name, t in stored.items() if "lora_" not in name}
    assert len(rows) == EXPECTED[kind]
    assert {tuple(t.shape) for t in rows.values()} == {(2, 32)}
    lora = sum(t.numel() for name, t in stored.items() if "lora_" in name)
    assert trainer.policy.network.num_trainable == lora + EXPECTED[kind] * 2 * 32
    before = AutoModelForCausalLM.from_pretrained(project.folder / "model")
    weight = before.get_input_embeddings().weight
    now = trainer.policy.network.inner.get_input_embeddings().token_adapter.base_layer.weight
    assert torch.equal(now[: len(weight)], weight)


def test_a_killed_run_ends_in_the_same_bits(run, tmp_path):
    _, project, _ = run
    shutil.copytree(project.run, tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoint-4")
    overrides = [f"train.output_dir={tmp_path / 'cut'}"]
    build(load(project.recipe, overrides), resume=tmp_path / "cut" / "checkpoint-2").fit()
    assert losses(tmp_path / "cut") == losses(project.run)
    assert_same(final_weights(tmp_path / "cut"), final_weights(project.run))


@torch.no_grad()
def test_export_merges_the_rows(run, tmp_path):
    kind, project, trainer = run
    out = export(project.run, tmp_path / "out")
    ids, count = ids_in(out)
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.config.vocab_size == count
    assert model.config.tie_word_embeddings == (kind == "qwen2")
    ours = trainer.policy.module.eval()(input_ids=ids).logits
    assert (model(input_ids=ids).logits - ours).abs().max() <= 1e-5 * ours.abs().max()


@torch.no_grad()
def test_the_adapter_is_continued_with_its_rows(run, tmp_path):
    _, project, trainer = run
    newest = checkpoints(project.run)[-1]
    overrides = [f"train.output_dir={tmp_path}", f"model.adapter={newest}", "method.lora.rank=2"]
    turned = NEW[::-1]  # the tokens keep the ids that they were trained with
    for given in ([], turned):
        recipe = load(project.recipe, [*overrides, f"model.new_special_tokens={given}"])
        tokens = build_codec(recipe, project.folder / "model").tokenizer
        assert tokens.convert_tokens_to_ids(NEW) == ids_in(newest)[0][0, 1:3].tolist()
        again = build(recipe)
    ids, _ = ids_in(newest)
    ours = trainer.policy.module.eval()(input_ids=ids).logits
    assert torch.equal(again.policy.module.eval()(input_ids=ids).logits, ours)
    assert again.policy.network.num_trainable == trainer.policy.network.num_trainable


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_gradients_are_those_of_these_rows_in_full_training(kind):
    ids = torch.tensor([[5, 9, 6, 9, 7, 8]])
    plain = tiny.model(kind)
    plain(input_ids=ids, labels=ids).loss.backward()
    model = tiny.model(kind)
    note_new_tokens(model, [9, 6])
    wrapped = LoRA(rank=2, new_tokens=True).apply(model)
    wrapped(input_ids=ids, labels=ids).loss.backward()
    found = [p.grad for name, p in wrapped.named_parameters() if "trainable_tokens" in name]
    matrices = {plain.get_input_embeddings().weight, plain.get_output_embeddings().weight}
    expected = [p.grad[[6, 9]] for p in plain.parameters() if p in matrices]
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-8)


def test_settings_that_contradict_it_are_refused():
    with pytest.raises(RecipeError, match=r"there are no new tokens; name them in model\.new_spec"):
        model = tiny.model()
        note_new_tokens(model, [])
        LoRA(new_tokens=True).apply(model)
    for other in ({"modules_to_save": ("lm_head",)}, {"targets": ("q_proj", "lm_head")}):
        with pytest.raises(RecipeError, match=r"lm_head(\.weight)? is trained already"):
            LoRA(new_tokens=True, **other).apply(tiny.model())
    with pytest.raises(RecipeError, match="its output head is more than a product with a matrix"):
        model = tiny.model()
        model.lm_head = torch.nn.Linear(32, 64, bias=True)
        LoRA(new_tokens=True).apply(model)


def test_a_mesh_that_divides_the_vocabulary_is_refused(tmp_path):
    project = Project(tmp_path, model=MODEL, method=LORA)

    def work(world):
        with pytest.raises(RecipeError, match="needs the input embeddings and the output head on"):
            build(load(project.recipe, ["parallel.tp=2"]), world=world)

    ranks.run(2, work, tp=2)


def test_without_it_new_tokens_need_another_setting(tmp_path):
    project = Project(tmp_path, model=MODEL, method={"lora": {"rank": 2}})
    with pytest.raises(RecipeError, match=r"set method\.lora\.new_tokens: true"):
        build(load(project.recipe))


def test_a_further_token_than_those_of_the_adapter_is_refused(run, tmp_path):
    _, project, _ = run
    newest = checkpoints(project.run)[-1]
    overrides = [f"train.output_dir={tmp_path}", f"model.adapter={newest}", "method.lora.rank=2"]
    more = f"model.new_special_tokens={[*NEW, '<more>']}"
    with pytest.raises(RecipeError, match="rows of new tokens in embed_tokens and lm_head would"):
        build(load(project.recipe, [*overrides, more]))


@pytest.mark.parametrize("kind", EXPECTED)
@pytest.mark.filterwarnings(TIED)
def test_modules_that_are_saved_without_the_head_leave_its_new_rows_and_are_refused(kind, tmp_path):
    lora = {"lora": {"rank": 2, "modules_to_save": ["embed_tokens"]}}
    project = Project(tmp_path, kind, model=MODEL, method=lora)
    with pytest.raises(
        RecipeError, match=r"new tokens in lm_head would .*name embed_tokens and lm"
    ):
        build(load(project.recipe))
    with pytest.raises(RecipeError, match=r"new tokens in embed_tokens would"):
        build(load(project.recipe, ["method.lora.modules_to_save=[lm_head]"]))


@pytest.mark.parametrize("kind", ["qwen2", pytest.param("llama", marks=pytest.mark.proof)])
@pytest.mark.filterwarnings(TIED)
def test_an_adapter_with_full_matrices_is_continued_without_naming_its_tokens(kind, tmp_path):
    lora = {"lora": {"rank": 2, "modules_to_save": ["embed_tokens", "lm_head"]}}
    project = Project(tmp_path, kind, model=MODEL, method=lora, train={"max_steps": 1})
    first = build(load(project.recipe))
    first.fit()
    newest = checkpoints(project.run)[-1]
    overrides = [f"train.output_dir={tmp_path / 'b'}", f"model.adapter={newest}", "method=lora"]
    again = build(load(project.recipe, [*overrides, "model.new_special_tokens=[]"]))
    ids, _ = ids_in(newest)
    theirs = opened_by_peft(project, newest)
    with torch.no_grad():
        ours = first.policy.module.eval()(input_ids=ids).logits
        assert torch.equal(again.policy.module.eval()(input_ids=ids).logits, ours)
        assert torch.allclose(theirs(input_ids=ids).logits, ours, atol=1e-5)


def test_the_template_of_an_adapter_is_its_own(tmp_path, caplog):
    project = Project(tmp_path, train={"max_steps": 1}, method=PLAIN, data={"cutoff_len": 128})
    build(load(project.recipe, ["data.template=empty"])).fit()
    overrides = [f"train.output_dir={tmp_path / 'b'}", f"model.adapter={project.run}/checkpoint-1"]
    recipe = load(project.recipe, [*overrides, "data.template=auto"])
    caplog.clear()
    codec = build_codec(recipe, tmp_path / "model")
    assert codec.template.source == bundled()["empty"].source
    assert not [record for record in caplog.records if "differs" in record.message]
    build_codec(load(project.recipe, [*overrides, "data.template=default"]), tmp_path / "model")
    assert "differs from the chat template saved with the adapter" in caplog.text
