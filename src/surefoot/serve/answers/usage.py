"""Counts of tokens."""

from __future__ import annotations


def usage_of(num_prompt: int, num_completion: int) -> dict[str, int]:
    """Tokens of prompts, each counted once, and of all responses, with the tokens that end them."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
    }
