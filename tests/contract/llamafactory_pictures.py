"""Small processors of five models that read pictures, and what LLaMA-Factory encodes with them.

``python tests/contract/llamafactory_pictures.py FOLDER`` writes ``llamafactory_pictures.json`` from
the ``mllm_demo.json`` in ``FOLDER`` and its pictures, in an environment with llamafactory 0.9.5,
transformers 5.6 and torchvision. Pictures of one size have the same tokens, so the file has sizes.
"""

import itertools
import json
import os
import sys
from pathlib import Path

import transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

WRITTEN = Path(__file__).with_suffix(".json")
QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>")
QWEN += ("<|image_pad|>", "<|video_pad|>")
GEMMA = ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>")
GEMMA += ("<end_of_image>", "<image_soft_token>")
LLAVA = ("<unk>", "<s>", "</s>", "<pad>", "<image>")
TEMPLATES = {
    "qwen2_vl": "qwen2_vl",
    "qwen2_5_vl": "qwen2_vl",
    "qwen3_vl": "qwen3_vl_nothink",
    "gemma3": "gemma3",
    "llava": "llava",
}
MODES = {  # its pixels at most, and whether the last answer alone is trained on
    "default": (768 * 768, False),
    "small": (10_000, False),
    "mask_history": (768 * 768, True),
}


def tokenizer(kind):
    """Bytes, and the special tokens of a family."""
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    if kind.startswith("qwen"):
        tokens, names = QWEN, {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    elif kind == "gemma3":
        tokens = GEMMA
        names = {"eos_token": "<eos>", "bos_token": "<bos>", "pad_token": "<pad>"}
        pictures = ("boi_token", "eoi_token", "image_token")
        names["extra_special_tokens"] = dict(zip(pictures, GEMMA[5:], strict=True))
    else:
        tokens = LLAVA
        names = {"eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>"}
        names["pad_token"] = "<pad>"
    made.add_special_tokens(list(tokens))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **names)


def image_processor(kind):
    """The image processor of a model, and the settings of its processor."""
    if kind.startswith("qwen"):
        size = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}
        patch_size = 16 if kind == "qwen3_vl" else 14
        return Qwen2VLImageProcessorPil(patch_size=patch_size, size=size), {}
    if kind == "gemma3":
        size = {"height": 112, "width": 112}
        return Gemma3ImageProcessorPil(size=size), {"image_seq_length": 16}
    crop = {"height": 56, "width": 56}
    settings = {"patch_size": 14, "vision_feature_select_strategy": "default"}
    settings["num_additional_image_tokens"] = 1
    return CLIPImageProcessorPil(size={"shortest_edge": 56}, crop_size=crop), settings


CLASSES = {
    "qwen2_vl": "Qwen2VLProcessor",
    "qwen2_5_vl": "Qwen2_5_VLProcessor",
    "qwen3_vl": "Qwen3VLProcessor",
    "gemma3": "Gemma3Processor",
    "llava": "LlavaProcessor",
}


def encode(kind, mode, rows, folder):
    """What LLaMA-Factory encodes: the ids of each row, and the spans that are trained on."""
    from llamafactory.data.processor.supervised import SupervisedDatasetProcessor
    from llamafactory.data.template import get_template_and_fix_tokenizer
    from llamafactory.hparams import DataArguments

    images, settings = image_processor(kind)
    parts = {"image_processor": images, "tokenizer": tokenizer(kind)}
    if kind.startswith("qwen"):
        name = "Qwen3VLVideoProcessor" if kind == "qwen3_vl" else "Qwen2VLVideoProcessor"
        parts["video_processor"] = getattr(transformers, name)()
    processor = getattr(transformers, CLASSES[kind])(**parts, **settings)
    processor.image_max_pixels, mask_history = MODES[mode]
    processor.image_min_pixels = 32 * 32
    arguments = DataArguments(
        template=TEMPLATES[kind], cutoff_len=100_000, mask_history=mask_history
    )
    template = get_template_and_fix_tokenizer(processor.tokenizer, arguments)
    encoder = SupervisedDatasetProcessor(template, processor.tokenizer, processor, arguments)
    for row in rows:
        *prompt, answer = row["messages"]
        paths = [str(folder / name) for name in row["images"]]
        media = {"images": paths, "videos": [], "audios": []}
        ids, labels = encoder._encode_data_example(prompt, [answer], "", "", **media)
        trained = [label != -100 for label in labels]
        bounds = [0, *(i for i in range(1, len(ids)) if trained[i] != trained[i - 1]), len(ids)]
        spans = [pair for pair in itertools.pairwise(bounds) if trained[pair[0]]]
        runs = [(value, len(list(group))) for value, group in itertools.groupby(ids)]
        yield {"input_ids": [v if n == 1 else [v, n] for v, n in runs], "trained": spans}


def main(folder):
    os.environ["DISABLE_VERSION_CHECK"] = "1"
    rows = json.loads((folder / "mllm_demo.json").read_text())
    found = {"made_by": f"LLaMA-Factory 0.9.5, transformers {transformers.__version__}"}
    found["rows"] = [
        {**row, "images": [Image.open(folder / name).size for name in row["images"]]}
        for row in rows
    ]
    for kind in TEMPLATES:
        found[kind] = {
            mode: list(encode(kind, mode, rows if mode == "default" else rows[:3], folder))
            for mode in MODES
        }
    WRITTEN.write_text(json.dumps(found, ensure_ascii=False, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
