"""A server under mixed requests for as long as one likes: does it keep what it has taken?

    .venv/bin/python benchmarks/serve.py --soak 60

Four clients send whole answers, streams, streams that they leave, several answers at once, stop
texts, JSON schemas, prompts, nonsense, connections that are cut, and requests to adapters, while
adapters are loaded and unloaded. Some requests come again and again. Each minute they pause until
nothing is open; then memory, threads, descriptors and slots are noted. After a warm-up (a fifth of
the time), the rest is cut into thirds. It fails if

- the median of USS in the last third is more than 3 % (and 8 MiB) above that of the first,
- the server has always more threads or descriptors in the last third than the least it had in the
  first,
- a slot is taken, or a response open, when nothing is asked,
- an answer has another status than it should have, or another log-probability, to the bit, than the
  first answer to the same request.
"""

import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import httpx
import psutil
from measure import say, table

CLIENTS = 4
SAMPLE_SECONDS = 60
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SCHEMA = {
    "type": "object",
    "properties": {"quantity": {"type": "integer"}},
    "required": ["quantity"],
    "additionalProperties": False,
}
STEADY = "steady"  # the name of an adapter that stays
CUT = (  # requests whose connections are cut
    (TEXT, b'{"model": "model", "prompt": "x", "max_tokens": 200, "ignore_eos": true}'),
)
GAUGES = ("responses_open", "responses_running", "responses_waiting")


@dataclass(frozen=True)
class Moment:
    """What the server has when nothing is asked."""

    minute: float
    rss: float  # MiB
    uss: float
    threads: int
    descriptors: int
    slots: Sequence[float]
    answers: int


@dataclass
class Soak:
    """The clients of one server, and what they saw."""

    url: str
    adapters: Sequence[Path]
    pause: float  # seconds between two requests of a client
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    first: dict[tuple[str, int], object] = field(default_factory=dict)  # answers of ``repeated``
    loaded: list[str] = field(default_factory=list)
    is_over: bool = False
    may_ask: threading.Event = field(default_factory=threading.Event)
    idle: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def client(self, seed: int) -> None:
        """Ask until it is over."""
        chance = random.Random(seed)
        kinds = [self.whole, self.streamed, self.left, self.several, self.stopped]
        kinds += [self.formed, self.nonsense, self.reset, self.repeated]
        while not self.is_over:
            if not self.may_ask.is_set():
                self.idle.release()
                self.may_ask.wait()
                continue
            ask = chance.choice(kinds)
            with self.noting(ask.__name__):
                ask(chance)
            time.sleep(chance.expovariate(1 / self.pause))

    @contextmanager
    def noting(self, name: str) -> Iterator[None]:
        """A block that is counted, or whose error is noted."""
        try:
            yield
            self.counts[name] += 1
        except (httpx.HTTPError, AssertionError, OSError, LookupError) as error:
            self.wrong.append(f"{name}: {type(error).__name__}: {str(error)[:200]}")

    def loader(self) -> None:
        """Load and unload adapters until it is over. A name that comes again may be another."""
        chance, number = random.Random(0), 0
        while not self.is_over:
            self.may_ask.wait()
            number += 1
            name, folder = f"adapter{number % 5}", chance.choice(self.adapters)
            with self.noting("loaded"):
                self.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
                self.loaded.append(name)
            time.sleep(4 * self.pause)
            if len(self.loaded) > 3:
                with self.noting("unloaded"):
                    self.post("/v1/unload_lora_adapter", {"lora_name": self.loaded.pop(0)})

    def post(self, path: str, body: dict[str, object], *expected: int) -> httpx.Response:
        """One answer, which has an expected status."""
        found = httpx.post(self.url + path, json=body, timeout=120, trust_env=False)
        assert found.status_code in (expected or (200,)), f"{found.status_code} {found.text[:150]}"
        return found

    def model(self, chance: random.Random) -> str:
        """The base, or an adapter that may be unloaded before it is asked."""
        return chance.choice(["model", "model", *self.loaded])

    def asked(self, chance: random.Random, **more: object) -> dict[str, object]:
        """A request with a prompt of its own."""
        length = chance.choice([3, 20, 90])
        prompt = [chance.randrange(5, 400) for _ in range(length)]
        body = {"model": self.model(chance), "prompt": prompt, "seed": chance.randrange(9)}
        return {**body, "temperature": 1, "max_tokens": chance.choice([4, 24, 60]), **more}

    def whole(self, chance: random.Random) -> None:
        """A completion in one piece."""
        self.post(TEXT, self.asked(chance, logprobs=2), 200, 404)

    def repeated(self, chance: random.Random) -> None:
        """A request whose answer must have the bits of the first one."""
        name, number = chance.choice(["model", STEADY]), chance.randrange(9)
        prompt = [5 + number * 31 + place for place in range(1 + 9 * number)]
        body = {"model": name, "prompt": prompt, "seed": number, "temperature": 1}
        answer = self.post(TEXT, {**body, "max_tokens": 24, "logprobs": 2}).json()["choices"]
        expected = self.first.setdefault((name, number), answer)
        assert answer == expected, f"another answer of {name} to prompt {number}"

    def several(self, chance: random.Random) -> None:
        """Several responses, with all settings."""
        more = {"top_p": 0.9, "top_k": 40, "presence_penalty": 0.5, "repetition_penalty": 1.1}
        self.post(TEXT, self.asked(chance, n=4, **more), 200, 404)

    def stopped(self, chance: random.Random) -> None:
        """A chat that a text ends."""
        ask = [{"role": "user", "content": "Count to " + str(chance.randrange(99))}]
        body = {"messages": ask, "max_tokens": 40, "temperature": 1, "stop": ["a", "e"]}
        self.post(CHAT, {"model": self.model(chance), **body}, 200, 404)

    def formed(self, chance: random.Random) -> None:
        """A chat in JSON."""
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
        ask = [{"role": "user", "content": "How many?"}]
        body = {"messages": ask, "max_tokens": 30, "temperature": 1, "response_format": form}
        self.post(CHAT, {"model": self.model(chance), **body}, 200, 404)

    def nonsense(self, chance: random.Random) -> None:
        """What is refused."""
        bad: list[tuple[dict[str, object], int]] = [
            ({"temperature": -1}, 400),
            ({"unknown": 1}, 400),
            ({"model": "nobody"}, 404),
            ({"prompt": [5] * 5000}, 400),
            ({"prompt": []}, 400),
            ({"n": 1000}, 400),
            ({"stop": ""}, 400),
        ]
        body, status = chance.choice(bad)
        self.post(TEXT, {"model": "model", "prompt": "x", **body}, status)

    def streamed(self, chance: random.Random) -> None:
        """A stream that is read."""
        self._stream(self.asked(chance, stream=True), most=None)

    def left(self, chance: random.Random) -> None:
        """A stream that is left after some lines."""
        body = self.asked(chance, stream=True, n=2, max_tokens=200, ignore_eos=True)
        self._stream(body, most=chance.randrange(1, 9))

    def _stream(self, body: dict[str, object], most: int | None) -> None:
        with httpx.stream(
            "POST", self.url + TEXT, json=body, timeout=120, trust_env=False
        ) as found:
            assert found.status_code in (200, 404), found.status_code
            for number, _ in enumerate(found.iter_lines()):
                if most is not None and number >= most:
                    break

    def reset(self, chance: random.Random) -> None:
        """A request whose connection is cut, with or without its end."""
        path, body = chance.choice(CUT)
        host, _, port = self.url.removeprefix("http://").partition(":")
        head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        data = head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body
        with socket.create_connection((host, int(port)), timeout=20) as connection:
            connection.sendall(data[: chance.choice([20, len(data) - 5, len(data)])])
            time.sleep(chance.random() / 5)
            linger = b"\x01\x00\x00\x00\x00\x00\x00\x00"
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)

    def gauges(self) -> list[float]:
        """Responses that are open, running and waiting."""
        figures = httpx.get(f"{self.url}/health", timeout=60, trust_env=False).json()
        return [figures[name] for name in GAUGES]

    def moment(self, process: psutil.Process, minute: float) -> Moment:
        """Let the clients pause; what the server has then."""
        self.may_ask.clear()
        for _ in range(CLIENTS):
            self.idle.acquire()
        end = time.monotonic() + 60
        while any(self.gauges()) and time.monotonic() < end:
            time.sleep(0.2)
        time.sleep(1)
        memory, slots = process.memory_full_info(), self.gauges()
        found = Moment(
            round(minute, 1),
            memory.rss / 2**20,
            memory.uss / 2**20,
            process.num_threads(),
            process.num_fds(),
            slots,
            self.counts.total(),
        )
        self.may_ask.set()
        return found


def problems(moments: Sequence[Moment], wrong: Sequence[str]) -> list[str]:
    """What has grown, by the rule above; it needs five moments."""
    found = [f"answers: {one}" for one in wrong[:10]]
    found += [f"minute {one.minute}: {one.slots} are open" for one in moments if any(one.slots)]
    rest = moments[max(1, len(moments) // 5) :]
    third = max(1, len(rest) // 3)
    first, last = rest[:third], rest[-third:]
    before, after = (median(one.uss for one in part) for part in (first, last))
    if after > before * 1.03 and after > before + 8:
        found.append(f"memory grows: USS {before:.0f} MiB at first, {after:.0f} MiB at last")
    reads: dict[str, Callable[[Moment], int]] = {
        "threads": lambda one: one.threads,
        "descriptors": lambda one: one.descriptors,
    }
    for name, read in reads.items():
        least, now = min(map(read, first)), min(map(read, last))
        if now > least:
            found.append(f"{name} grow: {least} at first, {now} at last")
    return found


def soaked(
    url: str, process: psutil.Process, adapters: Sequence[Path], minutes: float, pause: float
) -> tuple[list[Moment], Soak]:
    """Keep the clients busy for ``minutes``."""
    soak, start = Soak(url, adapters, pause), time.monotonic()
    every = [threading.Thread(target=soak.client, args=(i,), daemon=True) for i in range(CLIENTS)]
    every.append(threading.Thread(target=soak.loader, daemon=True))
    soak.may_ask.set()
    for thread in every:
        thread.start()
    moments = []
    while (now := time.monotonic() - start) < minutes * 60:
        time.sleep(min(SAMPLE_SECONDS, minutes * 60 / 6, max(0.1, minutes * 60 - now)))
        moments.append(soak.moment(process, (time.monotonic() - start) / 60))
        say(f"{moments[-1]} {len(soak.wrong)} wrong")
    soak.is_over = True
    for thread in every:
        thread.join(60)
    return moments, soak


def report(moments: Sequence[Moment], soak: Soak) -> str:
    """Every sixth moment or so, and how often each kind of request was answered."""
    step = max(1, len(moments) // 10)
    kept = [*moments[::step], *([] if (len(moments) - 1) % step == 0 else moments[-1:])]
    rows = [
        [
            f"{one.minute:.0f}",
            f"{one.rss:.0f}",
            f"{one.uss:.0f}",
            str(one.threads),
            str(one.descriptors),
            "/".join(f"{slot:.0f}" for slot in one.slots),
            f"{one.answers:,}",
        ]
        for one in kept
    ]
    head = ["minute", "RSS MiB", "USS MiB", "threads", "descriptors", "open/running/waiting"]
    counts = ", ".join(f"{name} {count:,}" for name, count in sorted(soak.counts.items()))
    return f"{table([*head, 'requests'], rows)}\n\nRequests: {counts}."
