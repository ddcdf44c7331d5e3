"""Companions: the small files beside a model's weights, which are copied unchanged. No torch."""

from __future__ import annotations

from pathlib import Path

# What lies beside the weights: the tokenizer, its template, processors, and code a model brings.
TOKENIZER = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"),
    *("*.model", "*.jinja", "chat_template.json", "additional_chat_templates/*"),
)
MODEL = ("*.py", "preprocessor_config.json", "processor_config.json", "LICENSE*")


def companions_of(model: Path, tokenizer: Path) -> dict[str, bytes]:
    """The companion files of two folders."""
    found = {}
    for folder, patterns in ((model, MODEL), (tokenizer, TOKENIZER)):
        for pattern in patterns:
            for path in sorted(folder.glob(pattern)):
                if path.is_file():
                    found[str(path.relative_to(folder))] = path.read_bytes()
    return found
