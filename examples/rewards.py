"""Rewards of examples/grpo.yaml and ppo.yaml: Python functions of completions and columns."""


def fields_right(completions: list[str], output: list[str]) -> list[float]:
    """The share of the record's fields that a completion has right; ``output`` is a column."""
    return [_share(completion, gold) for completion, gold in zip(completions, output, strict=True)]


def _share(completion: str, gold: str) -> float:
    wanted, found = gold.split("; "), completion.strip().split("; ")
    return sum(field in found for field in wanted) / max(len(wanted), len(found))


def city_hidden(completions: list[str], output: list[str]) -> list[float]:
    """The share of the other fields that are right, if the record does not tell the city."""
    return [
        _share(completion, _without_city(gold)) if "city: none" in completion else 0.0
        for completion, gold in zip(completions, output, strict=True)
    ]


def _without_city(gold: str) -> str:
    fields = gold.split("; ")
    return "; ".join("city: none" if field.startswith("city: ") else field for field in fields)
