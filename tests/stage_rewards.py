"""Rewards for tests."""


def varied(prompts, completions, **columns):
    """A number that depends on every character of an answer."""
    return [sum(map(ord, completion)) % 7 / 7 for completion in completions]


def flat(completions):
    """The same for all."""
    return [1.0] * len(completions)


def some(completions, output):
    """None for every second one; ``output`` is a column."""
    pairs = enumerate(zip(completions, output, strict=True))
    return [len(c) + len(o) if i % 2 else None for i, (c, o) in pairs]


def wrong(completions):
    """Too few."""
    return [1.0]


def broken(completions):
    """Raises for one of them."""
    return [1 / (text != "bad") for text in completions]


def angry(completions):
    """Raises for all of them."""
    raise ValueError("never")


def hanging(completions):
    """Never returns for one of them."""
    while "bad" in completions:
        pass
    return [1.0] * len(completions)


def unclear(completions):
    """NaN for one of them."""
    return [float("nan") if text == "bad" else 1.0 for text in completions]


def ending(completions):
    """Ends its process."""
    import os

    os._exit(7)


def loud(completions):
    """Prints."""
    print("not a result")
    return [1.0] * len(completions)


def short(completions):
    """One for all."""
    return [1.0]


def restless(completions, count=[0]):  # noqa: B006
    """Other numbers at each call."""
    count[0] += 1
    return [float(count[0])] * len(completions)


def deadly(completions, calls=[0]):  # noqa: B006
    """As ``varied``, but at the second call it kills the run, once."""
    import os
    import signal

    calls[0] += 1
    armed = os.environ.get("DEADLY_REWARD", "")
    if calls[0] == 2 and os.path.exists(armed):  # noqa: PTH110
        os.remove(armed)  # noqa: PTH107
        os.kill(os.getppid(), signal.SIGKILL)
    return varied(None, completions)


class Counter:
    """Counts the responses of a conversation, and ends it."""

    def __init__(self, row):
        self.goal, self.count = row["goal"], 0

    def step(self, response):
        self.count += 1
        return f"{self.count} of {self.goal}" if self.count < self.goal else None


class Named:
    def __init__(self, row):
        pass

    def step(self, response):
        return {"role": "user", "content": "1", "name": "counter"}


class Broken:
    def __init__(self, row):
        self.goal = row["other"]


class Wrong:
    def __init__(self, row):
        pass

    def step(self, response):
        return 3
