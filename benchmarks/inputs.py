"""What all subjects get: the same rows, the same tokenizer with its template, the same tiny model.

The rows are those of ``alpaca_en_demo.json`` where ``../shared/data`` has it, varied into as many
distinct rows as are asked for: each variant has the sentences of its answer in another order, after
an answer's sentence of another row. Without that file the rows are made of invented words.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import peft
import torch
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import (
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from surefoot.data.text.templates import bundled

EXAMPLE = Path(__file__).parent.parent / "examples" / "base-model"
ALPACA = Path(__file__).parents[2] / "shared" / "data" / "alpaca_en_demo.json"
VOCABULARY = 16_384
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# How Qwen2 and Qwen3 split text into words before byte-level BPE.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

Row = dict[str, str]


def make_dataset(folder: Path, num_rows: int) -> list[Row]:
    """``folder`` with ``rows.json`` and ``dataset_info.json``; the rows are also returned."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = _varied(_originals(), num_rows)
    (folder / "rows.json").write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")
    (folder / "dataset_info.json").write_text(json.dumps({"rows": {"file_name": "rows.json"}}))
    return rows


def make_model(
    folder: Path,
    rows: Sequence[Row],
    *,
    hidden: int = 64,
    layers: int = 2,
    vocabulary: int = VOCABULARY,
    intermediate: int | None = None,
) -> None:
    """A Qwen2, random (by default of a million parameters), with a byte-level BPE tokenizer of
    these rows. Where they give fewer tokens than ``vocabulary``, the model has room for more."""
    tokenizer = build_tokenizer(rows, min(vocabulary, VOCABULARY))
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer) if hidden == 64 else vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate or (hidden * 2 if hidden == 64 else hidden * 11 // 4),
        num_hidden_layers=layers,
        num_attention_heads=max(4, hidden // 64),
        num_key_value_heads=2,
        max_position_embeddings=1024,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        tie_word_embeddings=True,
        dtype="float32",
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)


def make_qwen3(folder: Path, **sizes: int) -> int:
    """A random Qwen3 in bfloat16, with the example's tokenizer; its number of parameters."""
    config = Qwen3Config(
        **{"vocab_size": 100_000, "head_dim": 128, **sizes},
        num_attention_heads=16,
        num_key_value_heads=8,
        tie_word_embeddings=True,
    )
    torch.set_default_dtype(torch.bfloat16)
    model = Qwen3ForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(EXAMPLE).save_pretrained(folder)
    return int(model.num_parameters())


def make_adapter(base: Path, folder: Path, *, seed: int, rank: int) -> None:
    """A LoRA adapter of all linear layers of ``base``, random in both matrices."""
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM.from_pretrained(base)
    config = peft.LoraConfig(r=rank, target_modules="all-linear", init_lora_weights=False)
    peft.get_peft_model(model, config).save_pretrained(folder)


def build_tokenizer(rows: Sequence[Row], vocabulary: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE of these rows, with ChatML."""
    rust = Tokenizer(models.BPE())
    rust.normalizer = normalizers.NFC()  # as transformers' class for Qwen2 has it
    split = pre_tokenizers.Split(Regex(WORDS), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    rust.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    rust.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(CONTROL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    rust.train_from_iterator((text for row in rows for text in row.values()), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=rust,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=bundled()["chatml"].source,
        model_max_length=1024,
    )


def _originals() -> list[Row]:
    if ALPACA.exists():
        rows = json.loads(ALPACA.read_text(encoding="utf-8"))
        return [{key: row[key] for key in ("instruction", "input", "output")} for row in rows]
    dice = random.Random(0)
    words = ["".join(dice.choices("aeioulnrstmdk", k=dice.randint(2, 9))) for _ in range(5000)]
    weights = [1 / (rank + 1) for rank in range(len(words))]  # Zipf's law, as in any language

    def text(sentences: int) -> str:
        lengths = (dice.randint(4, 18) for _ in range(sentences))
        parts = (" ".join(dice.choices(words, weights, k=length)) for length in lengths)
        return " ".join(f"{part.capitalize()}." for part in parts)

    return [
        {"instruction": text(1), "input": text(1) if i % 2 else "", "output": text(5)}
        for i in range(1000)
    ]


def _varied(originals: Sequence[Row], num_rows: int) -> list[Row]:
    """Distinct rows: the originals, then variants of them."""
    rows = {_key(row): row for row in originals[:num_rows]}
    variants = _variants(originals)
    while len(rows) < num_rows:
        row = next(variants)
        rows.setdefault(_key(row), row)
    return list(rows.values())


def _variants(originals: Sequence[Row]) -> Iterator[Row]:
    dice = random.Random(1)
    while True:
        for row in originals:
            sentences = re.split(r"(?<=[.!?])\s+", row["output"])
            dice.shuffle(sentences)
            first = dice.choice(originals)["output"].partition(". ")[0][:200]
            yield row | {"output": f"{first}. {' '.join(sentences)}"}


def _key(row: Row) -> tuple[str, ...]:
    return tuple(row.values())
