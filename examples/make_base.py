"""Build the demo's base model before it has learned anything: a tokenizer and random weights.

The tokenizer is a byte-level BPE trained on the corpus of ``make_data.py``, with a chat template
that marks what the assistant says. The model is a small Qwen3. ``surefoot train
examples/base.yaml`` pretrains it.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

HERE = Path(__file__).parent
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
MAX_VOCAB, NUM_TEXTS, MAX_LENGTH = 1536, 20_000, 512
# Words with their space, single digits and single signs: "brass" is a word wherever it stands.
WORDS = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]|\s+(?!\S)|\s+"
CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}
            {{- message.content + '<|im_end|>' }}
        {%- endgeneration %}
    {%- else %}
        {{- message.content + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def build_tokenizer(texts: Iterator[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of these texts: any text can be encoded, theirs in few tokens."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(WORDS), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=MAX_VOCAB,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[TURN_START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """A Qwen3 of one million random weights."""
    config = Qwen3Config(
        vocab_size=-(-len(tokenizer) // 64) * 64,  # a round number is faster
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        initializer_range=0.06,  # three times the usual: so small a model learns to copy sooner
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(config)


def read_texts(path: Path) -> Iterator[str]:
    """The texts of the corpus, one a line."""
    with path.open(encoding="utf-8") as lines:
        yield from (json.loads(line)["text"] for line in lines)


def main() -> None:
    """Write the untrained model and its tokenizer."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--corpus", type=Path, default=HERE / "data" / "corpus.jsonl")
    parser.add_argument("--out", type=Path, default=HERE / "untrained-model")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    tokenizer = build_tokenizer(islice(read_texts(arguments.corpus), NUM_TEXTS))
    model = build_model(tokenizer, arguments.seed)
    tokenizer.save_pretrained(arguments.out)
    model.save_pretrained(arguments.out)
    print(f"{arguments.out}: {model.num_parameters():,} weights, {len(tokenizer):,} tokens")


if __name__ == "__main__":
    main()
