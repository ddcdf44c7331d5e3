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


def worded(completions):
    """Text that float() would read, for one of them."""
    return ["1" if text == "bad" else 1.0 for text in completions]


def leaving(completions):
    """Exits, with a text that a terminal would act on."""
    raise SystemExit("\x1b[31menough")


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


def helped(completions):
    """Raises below a line of its own."""
    return [int(one) for one in completions]


def none(completions):
    """Forgets to return."""


def asks_for(completions, answer):
    """A column that is not there."""
    return [1.0 for _ in answer]


def for_chats(completions, prompts, **kwargs):
    """As one writes it for TRL where prompts are lists of messages."""
    pairs = zip(completions, prompts, strict=True)
    return [len(c[0]["content"]) + len(p[-1]["content"]) for c, p in pairs]


async def waiting(completions, completion_ids, log_metric, log_extra):
    """Awaits, logs, and takes ids, all as TRL has it."""
    import asyncio

    values = await asyncio.gather(*(asyncio.sleep(0, float(len(ids))) for ids in completion_ids))
    log_metric("mean_ids", sum(values) / len(values))
    log_extra("first", [text[:1] for text in completions])
    return values


SOLVED = set()


class Solver(Counter):
    """Knows what it has been told, also in a global of its file."""

    def step(self, response):
        SOLVED.add(response)
        self.heard = [*getattr(self, "heard", []), response]
        return super().step(response)


def solved(completions, environments):
    """What the environment of each conversation has heard, and its file."""
    return [len(one.heard) + 10.0 * (len(SOLVED) > 0) for one in environments]


def goals(completions, environments):
    """What the row of each conversation says."""
    return [one.goal for one in environments]


class AsyncCounter(Counter):
    """Each step waits until all conversations have begun theirs."""

    started = []

    async def step(self, response):
        import asyncio

        if response == "broken":
            raise ValueError("no")
        self.started.append(response)
        while len(self.started) < self.goal:
            await asyncio.sleep(0)


def fatal(completions, calls=[0]):  # noqa: B006
    """Is killed once, as by the kernel when memory is short."""
    import os
    import signal

    if os.path.exists(mark := completions[0]):  # noqa: PTH110
        os.remove(mark)  # noqa: PTH107
        os.kill(os.getpid(), signal.SIGKILL)
    return [1.0] * len(completions)
