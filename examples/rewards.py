"""Rewards of examples/grpo.yaml: plain Python functions of completions and dataset columns."""


def fields_right(completions: list[str], output: list[str]) -> list[float]:
    """The share of the record's fields that a completion has right; ``output`` is a column."""
    return [_share(completion, gold) for completion, gold in zip(completions, output, strict=True)]


def _share(completion: str, gold: str) -> float:
    wanted, found = gold.split("; "), completion.strip().split("; ")
    return sum(field in found for field in wanted) / max(len(wanted), len(found))
