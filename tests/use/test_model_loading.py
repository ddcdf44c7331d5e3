"""A model opens as it was trained: adapter, vocabulary, template and what ends an answer."""

import shutil

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

import surefoot
from folders import CHATML, edit_json, save_adapter, save_model, save_recipe, tokenizer
from surefoot.data.example import Message
from surefoot.errors import ModelError, SurefootError, TemplateError
from surefoot.recipe.recipe import load
from surefoot.run.parts import RunParts
from surefoot.use import open_model
from surefoot.use.model_loading import open_start

IDS = torch.arange(60, 76)[None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    save_model(folder / "base")
    save_adapter(folder / "base", folder / "adapter")
    return folder


def test_a_plain_folder_gives_transformers_logits(folder):
    expected = AutoModelForCausalLM.from_pretrained(folder / "base").eval()
    opened = open_model(folder / "base")
    assert torch.equal(opened.model(IDS).logits, expected(IDS).logits)
    assert not opened.model.training
    assert opened.recipe is None
    assert not opened.generate.do_sample


def test_an_adapter_finds_its_base_and_uses_its_tokenizer(folder):
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    expected = PeftModel.from_pretrained(base, folder / "adapter").eval()
    opened = open_model(folder / "adapter")
    assert torch.equal(opened.model(IDS).logits, expected(IDS).logits)
    assert not opened.model.training
    assert opened.tokenizer.chat_template == CHATML


def test_an_adapters_own_tokenizer_wins(folder, tmp_path):
    template = CHATML.replace("<|im_start|>", "> ")
    save_adapter(folder / "base", tmp_path, template=template)
    assert open_model(tmp_path).tokenizer.chat_template == template


@pytest.mark.parametrize("options", [{"base": "base"}, {"adapter": "adapter"}])
def test_a_base_that_moved_is_given_by_hand(folder, tmp_path, options):
    moved = shutil.copytree(folder / "adapter", tmp_path / "adapter")
    edit_json(moved / "adapter_config.json", base_model_name_or_path="/gone")
    path = moved if "base" in options else folder / "base"
    given = {"base": folder / "base"} if "base" in options else {"adapter": moved}
    expected = open_model(folder / "adapter").model(IDS).logits
    assert torch.equal(open_model(path, **given).model(IDS).logits, expected)


@pytest.mark.parametrize("name", ["/gone", "gone/elsewhere", None])
def test_an_adapter_without_its_base_says_what_to_do(folder, tmp_path, name):
    moved = shutil.copytree(folder / "adapter", tmp_path / "adapter")
    edit_json(moved / "adapter_config.json", base_model_name_or_path=name)
    with pytest.raises(ModelError, match=r"the base model of this adapter, .* --base"):
        open_model(moved)


def test_options_that_contradict_each_other_are_refused(folder):
    base, adapter = folder / "base", folder / "adapter"
    with pytest.raises(ModelError, match="is a full model"):
        open_model(base, base=base)
    with pytest.raises(ModelError, match="is an adapter already"):
        open_model(adapter, adapter=adapter)
    with pytest.raises(ModelError, match=r"contains no adapter_config\.json"):
        open_model(base, adapter=base)
    with pytest.raises(ModelError, match="merge it first with `surefoot export`"):
        open_model(adapter, base=adapter)


def test_an_adapter_of_another_model_is_refused(folder, tmp_path):
    save_model(tmp_path / "other", hidden_size=64, head_dim=16)
    with pytest.raises(ModelError, match=r"another model.*size mismatch"):
        open_model(folder / "adapter", base=tmp_path / "other")


def test_a_vocabulary_that_grew_grows_the_base(folder, tmp_path):
    modules = ["embed_tokens", "lm_head"]
    save_adapter(
        folder / "base", tmp_path, template=CHATML, extra=["<new>"], modules_to_save=modules
    )
    opened = open_model(tmp_path)
    new = opened.tokenizer.convert_tokens_to_ids("<new>")
    assert opened.model.get_input_embeddings().num_embeddings == new + 1
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    base.resize_token_embeddings(new + 1, mean_resizing=False)
    expected = PeftModel.from_pretrained(base, tmp_path).eval()
    ids = torch.tensor([[60, new, 61]])
    torch.testing.assert_close(opened.model(ids).logits, expected(ids).logits)


def test_prompts_are_what_the_template_says(folder):
    opened = open_model(folder / "base")
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hé?"}]
    expected = opened.tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    assert opened.prompt([Message("system", "Be brief."), Message("user", "Hé?")]) == expected


def test_an_answer_ends_with_the_template_the_tokenizer_or_the_model(folder, tmp_path):
    path = shutil.copytree(folder / "base", tmp_path / "base")
    edit_json(path / "generation_config.json", eos_token_id=[7, 9])
    opened = open_model(path)
    known = {"<|im_end|>", "<|endoftext|>"}
    assert set(opened.stop_token_ids) == {
        7,
        9,
        *opened.tokenizer.convert_tokens_to_ids(list(known)),
    }


def test_a_model_without_a_template_continues_text(tmp_path):
    opened = open_model(save_model(tmp_path / "base", template=None))
    assert opened.template is None
    assert opened.tokenizer.decode(opened.continuation("Once é")) == "Once é"
    with pytest.raises(TemplateError):
        opened.prompt([Message("user", "hello")])


def test_text_is_not_continued_behind_its_end(tmp_path):
    from tokenizers import processors

    folder = save_model(tmp_path / "base", template=None)
    ending = tokenizer(None)
    eos = ending.eos_token
    ending.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {eos}", special_tokens=[(eos, ending.eos_token_id)]
    )
    ending.save_pretrained(folder)
    opened = open_model(folder)
    assert opened.tokenizer("a")["input_ids"][-1] == ending.eos_token_id
    assert opened.continuation("a") == opened.tokenizer("a")["input_ids"][:-1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_can_be_held_in_another_type(folder, dtype):
    opened = open_model(folder / "base", dtype=dtype)
    assert {p.dtype for p in opened.model.parameters()} == {getattr(torch, dtype)}


def test_damaged_files_are_named(folder, tmp_path):
    path = shutil.copytree(folder / "base", tmp_path / "base")
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(SurefootError, match=r"model\.safetensors"):
        open_model(path)
    shutil.copy(folder / "base" / "model.safetensors", weights)
    (path / "tokenizer.json").write_text('{"half')
    with pytest.raises(ModelError, match="cannot load its tokenizer"):
        open_model(path)


CONFIGS = {
    "code of its own": (
        '{"model_type": "odd", "auto_map": {"AutoConfig": "odd.Config"}}',
        "Python code of its own; if you trust that, set model.trust_remote_code=true",
    ),
    "unknown": ('{"model_type": "odd"}', "cannot load the model: .*odd"),
    "nameless": ("{}", "cannot load the model: .*model_type"),
    "broken": ("{", "config.json"),
    "a list": ("[]", "config.json|cannot load"),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_configuration_that_cannot_be_read_is_an_error_wherever_it_is_read(
    kind, folder, tmp_path
):
    recipe = save_recipe(tmp_path)
    text, said = CONFIGS[kind]
    (tmp_path / "model" / "config.json").write_text(text)
    with pytest.raises(SurefootError, match=said):
        open_model(tmp_path / "model")
    with pytest.raises(SurefootError, match=said):
        surefoot.train(recipe)


def test_a_run_opens_with_its_recipe(tmp_path):
    recipe = save_recipe(
        tmp_path,
        method={"lora": {"rank": 2}},
        data={"default_system": "Add."},
        generate={"max_new_tokens": 9},
    )
    surefoot.train(recipe)
    opened = open_model(tmp_path / "run")
    assert opened.generate.max_new_tokens == 9
    text = opened.tokenizer.decode(opened.prompt([Message("user", "1+1?")]))
    assert text.startswith("<|im_start|>system\nAdd.<|im_end|>")


def test_a_run_whose_base_moved_finds_it_by_its_recipe(tmp_path):
    recipe = save_recipe(tmp_path, method={"lora": {"rank": 2}})
    surefoot.train(recipe)
    copy = tmp_path / "adapter"  # a plain adapter folder, which may be edited
    shutil.copytree(
        tmp_path / "run" / "checkpoint-4",
        copy,
        ignore=shutil.ignore_patterns("manifest.json", "state.*", "optimizer.*"),
    )
    edit_json(copy / "adapter_config.json", base_model_name_or_path="/gone")
    assert open_model(copy).recipe is not None


def test_a_start_is_what_training_begins_with(tmp_path):
    recipe = load(
        save_recipe(tmp_path, model={"new_special_tokens": ["<n>"]}, data={"template": "default"})
    )
    opened = open_start(RunParts.to_measure(recipe))
    assert opened.template.name == "default"
    new = opened.tokenizer.convert_tokens_to_ids("<n>")
    weight = opened.model.get_input_embeddings().weight
    assert len(weight) == new + 1
    torch.testing.assert_close(weight[new], weight[:new].mean(0))


def test_a_start_has_the_adapter_the_recipe_goes_on_from(tmp_path):
    save_recipe(tmp_path)
    save_adapter(tmp_path / "model", tmp_path / "adapter")
    adapted = {"path": str(tmp_path / "model"), "adapter": str(tmp_path / "adapter")}
    recipe = load(save_recipe(tmp_path, model=adapted, method={"lora": {}}))
    expected = open_model(tmp_path / "adapter").model(IDS).logits
    assert torch.equal(open_start(RunParts.to_measure(recipe)).model(IDS).logits, expected)
