"""Rows with pictures beside LLaMA-Factory's, token for token, from its own files."""

import json

import llamafactory_pictures as theirs
import pytest
from PIL import Image
from transformers import AutoConfig

from surefoot.batch import IGNORE_INDEX
from surefoot.data.media.files import seen_in
from surefoot.data.rows.catalog import training_examples
from surefoot.errors import RecipeError
from surefoot.plugins.migrate.conversion import convert_llamafactory
from surefoot.recipe.recipe import load_converted
from surefoot.recipe.recipe_data import open_codec
from surefoot.recipe.yaml import parse

OWN = {  # how the models' own templates write a turn and a picture
    "qwen": ("<|im_start|>", "<|im_end|>", "<|vision_start|><|image_pad|><|vision_end|>"),
    "gemma3": ("<start_of_turn>", "<end_of_turn>", "<start_of_image>"),
    "llava": ("", "</s>", "<image>"),
}
TEMPLATE = (
    "{%% for message in messages %%}%s{{ message.role }}\n{%% for part in message.content %%}"
    "{%% if part.type == 'image' %%}%s{%% else %%}{{ part.text }}{%% endif %%}{%% endfor %%}%s\n"
    "{%% endfor %%}"
)
WRITTEN = json.loads(theirs.WRITTEN.read_text(encoding="utf-8"))


@pytest.fixture(scope="module", params=theirs.TEMPLATES)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def folder(kind, tmp_path_factory):
    """A model's folder, and the data as LLaMA-Factory has it beside its recipe."""
    folder = tmp_path_factory.mktemp(kind)
    (folder / "model").mkdir()
    AutoConfig.for_model(kind).save_pretrained(folder / "model")
    begin, end, picture = OWN["qwen" if kind.startswith("qwen") else kind]
    tokenizer = theirs.tokenizer(kind)
    tokenizer.chat_template = TEMPLATE % (begin, picture, end)
    tokenizer.save_pretrained(folder / "model")
    images, settings = theirs.image_processor(kind)
    images.save_pretrained(folder / "model")
    settings["processor_class"] = theirs.CLASSES[kind]
    (folder / "model" / "processor_config.json").write_text(json.dumps(settings))
    rows = []
    for number, row in enumerate(WRITTEN["rows"]):
        names = [f"{number}-{at}.jpg" for at in range(len(row["images"]))]
        for name, size in zip(names, row["images"], strict=True):
            Image.new("RGB", size, (200, 30, 30)).save(folder / name)
        rows.append({**row, "images": names})
    (folder / "mllm_demo.json").write_text(json.dumps(rows))
    tags = {"role_tag": "role", "content_tag": "content"}
    tags |= {"user_tag": "user", "assistant_tag": "assistant"}
    columns = {"messages": "messages", "images": "images"}
    entry = {"file_name": "mllm_demo.json", "formatting": "sharegpt"}
    entry |= {"columns": columns, "tags": tags}
    (folder / "dataset_info.json").write_text(json.dumps({"mllm_demo": entry}))
    return folder


def translated(folder, kind, **values):
    """The recipe of a file of LLaMA-Factory's."""
    values |= {"model_name_or_path": str(folder / "model"), "template": theirs.TEMPLATES[kind]}
    values |= {"dataset": "mllm_demo", "dataset_dir": str(folder), "do_train": True}
    values |= {"output_dir": str(folder / "out"), "stage": "sft", "cutoff_len": 2048}
    return load_converted(convert_llamafactory(parse(json.dumps(values), "their.yaml"), (), {}))


def encoded(folder, kind, mode):
    max_pixels, mask_history = theirs.MODES[mode]
    recipe = translated(folder, kind, mask_history=mask_history, image_max_pixels=max_pixels)
    codec = open_codec(recipe, folder / "model")
    examples = list(training_examples(recipe.data))
    return codec, [item for found in codec.encode_chats(examples) for item in found]


def ids_of(row, kind, mode, images):
    """Their ids. They make a picture smaller before Qwen's processor, which then rounds its size
    again; within the limit of its own, as whoever serves the model has it, that rounds once."""
    runs = [run if isinstance(run, list) else [run, 1] for run in row["input_ids"]]
    if kind.startswith("qwen") and mode == "small":
        processor = theirs.image_processor(kind)[0]
        processor.size["longest_edge"] = theirs.MODES[mode][0]
        pad = theirs.tokenizer(kind).convert_tokens_to_ids("<|image_pad|>")
        blanks = (Image.new("RGB", size) for size in images)
        grids = (processor([b], return_tensors="pt")["image_grid_thw"].prod() for b in blanks)
        runs = [[pad, int(next(grids)) // 4] if run[0] == pad else run for run in runs]
    return [token for token, count in runs for _ in range(count)]


def trained_texts(codec, item):
    labels = item["labels"]
    bounds = [i for i in range(1, len(labels)) if (labels[i] < 0) != (labels[i - 1] < 0)]
    spans = zip([0, *bounds], [*bounds, len(labels)], strict=True)
    texts = [codec.tokenizer.decode(labels[a:b]) for a, b in spans if labels[a] != IGNORE_INDEX]
    return [text.rstrip("\n") for text in texts]


@pytest.mark.parametrize("mode", theirs.MODES)
def test_tokens_and_what_is_trained_are_theirs(kind, folder, mode):
    codec, items = encoded(folder, kind, mode)
    written = WRITTEN[kind][mode]
    rows = [row["images"] for row in WRITTEN["rows"][: len(written)]]
    for item, row, images in zip(items[: len(written)], written, rows, strict=True):
        plain = ids_of(row, kind, "as it is", ())
        learnt = [codec.tokenizer.decode(plain[a:b]).rstrip("\n") for a, b in row["trained"]]
        ids = ids_of(row, kind, mode, images)
        assert list(item["input_ids"]) == ids
        assert trained_texts(codec, item) == learnt
        assert sum(seen.tokens for seen in seen_in(item)) == ids.count(
            max(codec.media.processor.token_ids)
        )


@pytest.mark.parametrize("kind", ["gemma3"], indirect=True)
def test_the_parts_that_it_freezes_are_frozen(kind, folder):
    both = translated(folder, kind, finetuning_type="full", media_dir=str(folder))
    assert both.method.frozen_modules == ("tower", "projector")
    assert (both.data.media.folder, both.data.media.max_pixels) == (folder, 768 * 768)
    tower = translated(folder, kind, finetuning_type="full", freeze_multi_modal_projector=False)
    assert tower.method.frozen_modules == ("tower",)
    with pytest.raises(RecipeError, match="use_badam: its blocks have the tower"):
        translated(folder, kind, finetuning_type="full", use_badam=True)
    with pytest.raises(RecipeError, match="freeze_vision_tower: only finetuning_type: full, lora"):
        translated(folder, kind, finetuning_type="freeze", freeze_vision_tower=False)


@pytest.mark.parametrize("kind", ["gemma3"], indirect=True)
@pytest.mark.parametrize("finetuning_type", ["lora", "oft"])
def test_the_parts_that_it_does_not_freeze_have_adapters(kind, finetuning_type, folder):
    def made(**values):
        return translated(folder, kind, finetuning_type=finetuning_type, **values).method

    assert made().parts == ("language",)
    assert made(freeze_vision_tower=False).parts == ("tower", "language")
    projector = {"freeze_multi_modal_projector": False}
    with pytest.raises(RecipeError, match=r"_projector: .*_target: all does not adapt the projec"):
        made(**projector)
    named = made(**projector, **{f"{finetuning_type}_target": "q_proj,linear_1"})
    assert (named.parts, named.targets) == (("projector", "language"), ("q_proj", "linear_1"))
    if finetuning_type == "lora":
        adapter = {"adapter_name_or_path": str(folder), "freeze_vision_tower": False}
        assert made(**adapter).parts == ("language",), "it is trained further on what it adapts"
        assert made(**adapter, create_new_adapter=True).parts == ("tower", "language")
