"""The reward of the recipes with GRPO; write your own: completions, and the columns of the rows."""


def is_right(completions: list[str], answer: list[str]) -> list[float]:
    """1 for a completion whose last line contains the row's column ``answer``, otherwise 0."""
    last_lines = [(completion.strip().splitlines() or [""])[-1] for completion in completions]
    return [float(wanted in line) for line, wanted in zip(last_lines, answer, strict=True)]
