"""Models of true shapes with random weights made on the device, and rows of true lengths.

    python benchmarks/gpu/shapes.py TASK.json

The task names a ``shape`` or ``rows``, the ``target`` folder and the ``device``. A folder is
complete once it contains ``ready``.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import inputs
import tokens
import torch
from datasets import load_from_disk
from sizes import SHAPES, Shape
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

# Tokens of prompts and responses of alpaca_en_demo.json (999 rows), by a byte-level BPE of 16,384
# tokens trained on them: quantiles from 0 to 1 in steps of a tenth.
CHATS = (
    (4, 8, 9, 11, 12, 14, 16, 19, 24, 31, 156),
    (1, 10, 18, 33, 63, 105, 154, 212, 276, 349, 559),
)
LONG = {"2k": 2048, "8k": 8192, "32k": 32_768}  # rows of this many tokens, one document each
PAIRS = {"tiny": 64} | {
    f"{k}k": k * 1024 for k in (2, 4, 6, 8, 10, 12, 16, 32, 64, 96)
}  # tokens of prompts
ANSWER = 384  # tokens of a response to a long prompt, on average
NUM_WORDS = 3000  # each is a token of its own
NUM_ROWS = {"chats": 2000, "2k": 200, "8k": 60, "32k": 20, "tiny": 64}
Text = Callable[[float], str]  # of so many words


def words() -> list[str]:
    """Invented words, the most frequent first."""
    dice = random.Random(0)
    found: dict[str, None] = {}
    while len(found) < NUM_WORDS:
        found["".join(dice.choices("aeioulnrstmdk", k=dice.randint(3, 8)))] = None
    return list(found)


def tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE in which a word is about one token."""
    rows = [{"text": " ".join(words())} for _ in range(4)]
    made = inputs.build_tokenizer(rows, min(vocabulary, inputs.VOCABULARY))
    made.model_max_length = 131_072
    return made


def make_model(folder: Path, shape: Shape, device: str) -> None:
    """A model of this shape in bfloat16, its values made on the device."""
    found = tokenizer(shape.vocabulary)
    config = Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_width,
        max_position_embeddings=131_072,
        tie_word_embeddings=shape.is_tied,
        eos_token_id=found.eos_token_id,
        pad_token_id=found.pad_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen3ForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="5GB")
    found.save_pretrained(folder)


def make_rows(folder: Path, kind: str) -> None:
    """``rows.json`` and ``dataset_info.json``; of conversations also the tokens, for the peers."""
    dice, known = random.Random(1), words()
    zipf = list(accumulate(1 / (rank + 1) for rank in range(len(known))))  # as in any language

    def text(length: float) -> str:
        return " ".join(dice.choices(known, cum_weights=zipf, k=max(1, round(length))))

    folder.mkdir(parents=True, exist_ok=True)
    is_ranking = kind.startswith("pairs-")
    rows = list(_pairs(kind, dice, text) if is_ranking else _chats(kind, dice, text))
    (folder / "rows.json").write_text(json.dumps(rows))
    info = {"rows": {"file_name": "rows.json", "ranking": is_ranking}}
    (folder / "dataset_info.json").write_text(json.dumps(info))
    tokenizer(SHAPES["tiny" if kind.endswith("tiny") else "8B"].vocabulary).save_pretrained(folder)
    if not is_ranking:
        tokens.tokenize(folder, cutoff_len=LONG.get(kind, 256 if kind == "tiny" else 2048))
        lengths = [len(ids) for ids in load_from_disk(folder / "tokenized")["input_ids"]]
        weighted = sum(n * n for n in lengths) / sum(lengths)
        figures = {"mean": sum(lengths) / len(lengths), "weighted_mean": weighted}
        (folder / "lengths.json").write_text(json.dumps(figures))


def _chats(kind: str, dice: random.Random, text: Text) -> Iterator[dict[str, str]]:
    """Short conversations with the lengths of Alpaca's, or long documents."""
    for _ in range(NUM_ROWS[kind]):
        if kind in LONG:
            prompt, answer = 32.0, 1.1 * LONG[kind]  # truncated to the exact length
        else:
            prompt, answer = (_at(quantiles, dice.random()) for quantiles in CHATS)
        yield {"instruction": text(prompt), "input": "", "output": text(answer)}


def _pairs(kind: str, dice: random.Random, text: Text) -> Iterator[dict[str, str]]:
    """Two responses to a long prompt."""
    prompt = PAIRS[kind.removeprefix("pairs-")]
    mean = min(ANSWER, prompt / 4)
    for _ in range(64 if prompt <= 2048 else 8):
        spread = dice.uniform(0.9, 1.0) if prompt > 2048 else dice.uniform(0.5, 1.5)
        answers = {name: text(mean * dice.uniform(0.5, 1.5)) for name in ("chosen", "rejected")}
        yield {"instruction": text(prompt * spread), "input": "", **answers}


def _at(quantiles: tuple[int, ...], place: float) -> float:
    """The value at a place from 0 to 1."""
    index, share = divmod(place * (len(quantiles) - 1), 1)
    low, high = quantiles[int(index)], quantiles[int(index) + 1]
    return low + share * (high - low)


def main(todo: Mapping[str, str]) -> None:
    """Make what the task names, from scratch."""
    target = Path(todo["target"])
    shutil.rmtree(target, ignore_errors=True)
    if "shape" in todo:
        make_model(target, SHAPES[todo["shape"]], todo["device"])
    else:
        make_rows(target, todo["rows"])
    (target / "ready").touch()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
