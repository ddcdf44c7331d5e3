"""Tiny tokenizers of the kinds that are out there, each with its traps, trained on a few lines."""

import json
from functools import cache

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

CONTROL = ["<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
CONTROL += ["<start_of_turn>", "<end_of_turn>"]
SPECIAL = ["<unk>", "<s>", "</s>", *CONTROL]
LINES = [
    "Below is an instruction that describes a task.\n\n### Instruction:\nHello\n\n### Response:\n",
    "What is the capital of France? Paris.\n\n  def f(x):\n\t\treturn x + 1\n\n\n",
    "system user assistant model Human Assistant USER ASSISTANT: the answer is 12345, 你好 é 🙂",
]
QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _train(tokenizer, **options):
    trainer = trainers.BpeTrainer(vocab_size=420, show_progress=False, **options)
    tokenizer.train_from_iterator(LINES * 4, trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    return tokenizer


def _train_bytes(tokenizer):
    """With a token for every byte, which are of the vocabulary but not special."""
    tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    made = json.loads(_train(tokenizer, special_tokens=["<unk>", *tokens]).to_str())
    made["added_tokens"] = [t for t in made["added_tokens"] if t["content"] not in tokens]
    return Tokenizer.from_str(json.dumps(made))


def gpt2():
    """Byte-level, white space joined as GPT-2 does: ``\\n\\n`` depends on what follows."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return _train(made, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())


def qwen():
    """Byte-level with Qwen's pattern and NFC; line breaks are joined over the end of a header."""
    made = Tokenizer(models.BPE())
    made.normalizer = normalizers.NFC()
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = pre_tokenizers.Split(Regex(QWEN), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    made.decoder = decoders.ByteLevel()
    return _train(made, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())


def llama3():
    """Adds a first token by itself, and its offsets leave out white space, as Llama 3's do."""
    made = qwen()
    bos = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))]
    )
    made.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), bos])
    return made


def llama2():
    """SentencePiece as Llama 2 has it: a space before every part, bytes for unknown letters."""
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    made = _train_bytes(made)
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))]
    )
    return made


def metaspace():
    """SentencePiece as newer tokenizers have it: a space before the first part only."""
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return _train_bytes(made)


KINDS = {"gpt2": gpt2, "qwen": qwen, "llama3": llama3, "llama2": llama2, "metaspace": metaspace}


@cache
def _trained(kind):
    return KINDS[kind]().to_str()


def tokenizer(kind="qwen", *, chat_template=None, **names):
    """A fresh tokenizer of ``kind``; ``names`` are its special tokens (``eos_token`` ...)."""
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", **names}
    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained(kind)),
        **{name: token for name, token in names.items() if token},
    )
    made.chat_template = chat_template
    return made


def bare_tokenizer():
    """One without any chat tokens."""
    made = json.loads(_trained("llama2"))
    made["added_tokens"] = [t for t in made["added_tokens"] if t["content"] in SPECIAL[:3]]
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(made)), bos_token="<s>", eos_token="</s>"
    )


def word_tokenizer():
    """One that knows whole words only, among them its special tokens."""
    made = Tokenizer(models.WordLevel({"a": 0, "</s>": 1, "<unk>": 2}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", unk_token="<unk>")
