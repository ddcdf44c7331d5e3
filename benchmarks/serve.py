"""Tokens per second and time to the first token of servers of OpenAI's API, at 1, 8 and 32 clients.

    .venv/bin/python benchmarks/serve.py --repetitions 1

The same random weights are served by ``surefoot serve``, ``transformers serve`` (as it starts, and
with continuous batching) and LLaMA-Factory's server (one request at a time, as it starts, and eight
in threads), where ``--llamafactory`` names its command, in an environment of its own. All servers
are up, and take turns: one alone has requests at a time. Every client sends one greedy request of
its own; a round is over when all are answered. Tokens are those of ``usage``; before the rounds,
the texts of eight answers are compared with Surefoot's. On a busy machine only tokens per CPU
second of the server say something.

``--adapters 1,2,4,8`` measures adapters of one base beside each other, ``--soak MINUTES`` whether a
server keeps what it has taken.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
import numpy as np
import psutil
from inputs import make_adapter, make_dataset, make_model
from measure import machine, say, spread, table, versions
from soak import STEADY, problems, report, soaked

Server = tuple[str, psutil.Process]  # its address
SECONDS_TO_START = 180
SIZES: dict[str, dict[str, int]] = {
    "5M": {"hidden": 256, "layers": 6, "vocabulary": 4096},
    "27M": {"hidden": 512, "layers": 8, "vocabulary": 8192},
}
SYSTEM = (
    "You answer questions about towns."  # LLaMA-Factory's template has one of its own otherwise
)
NUM_COMPARED = 8  # answers
WORDS = ["trees", "rivers", "towns", "roads", "ships", "birds", "bread", "snow"]


class Round(NamedTuple):
    """What one round of requests measured."""

    per_second: float  # tokens
    per_cpu_second: float
    waits: list[float]  # seconds to the first token of each client


def commands(model: Path, llamafactory: str | None) -> dict[str, tuple[list[str], dict[str, str]]]:
    """The command of each server, without its port, and its environment."""
    scripts = Path(sys.executable).parent
    transformers = [str(scripts / "transformers"), "serve", str(model), "--device", "cpu"]
    found: dict[str, tuple[list[str], dict[str, str]]] = {
        "surefoot": ([sys.executable, "-m", "surefoot", "serve", str(model)], {}),
        "transformers": (transformers, {}),
        "transformers, batching": ([*transformers, "--continuous-batching"], {}),
    }
    if llamafactory:
        options = ["--model_name_or_path", str(model), "--template", "qwen"]
        command = [llamafactory, "api", *options, "--infer_dtype", "float32"]
        own = {"PYTHONPATH": "", "DISABLE_VERSION_CHECK": "1", "API_HOST": "127.0.0.1"}
        found["llamafactory"] = (command, own)
        found["llamafactory, 8 threads"] = (command, {**own, "MAX_CONCURRENT": "8"})
    return found


@contextmanager
def started(
    name: str, command: list[str], own: Mapping[str, str], port: int, log: Path
) -> Iterator[Server]:
    """A server; its address once it answers. Raises ``RuntimeError`` if it does not start."""
    options = [] if name.startswith("llamafactory") else ["--port", str(port)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "API_PORT": str(port), **own}
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, *options], env=environment, stdout=output, stderr=output
        )
    try:
        url = f"http://127.0.0.1:{port}"
        end = time.monotonic() + SECONDS_TO_START
        while process.poll() is None and time.monotonic() < end:
            try:
                httpx.get(f"{url}/v1/models", trust_env=False, timeout=5)
                break
            except httpx.HTTPError:
                time.sleep(0.5)
        else:
            raise RuntimeError(f"{name} does not start: {log.read_text()[-300:]}")
        yield url, psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(30)


def body(name: str, model: Path, client: int, count: int) -> dict[str, object]:
    """A greedy request of a client's own."""
    text = f"Name a reason why {WORDS[client % len(WORDS)]} matter to a town of {client} houses."
    greedy = {"do_sample": False} if name.startswith("llamafactory") else {"temperature": 0}
    return {
        "model": model.name if name == "surefoot" else str(model),
        "messages": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": text},
        ],
        "max_tokens": count,
        **greedy,
    }


def of_adapters(count: int, client: int, tokens: int) -> dict[str, object]:
    """A greedy request to one of ``count`` adapters."""
    asked = body("surefoot", Path("model"), client, tokens)
    return {**asked, "model": f"adapter{client % count}"}


def answered(url: str, asked: Mapping[str, object]) -> tuple[str, int]:
    """The text of one answer, and its tokens."""
    found = httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=600, trust_env=False)
    found.raise_for_status()
    answer = found.json()
    return answer["choices"][0]["message"]["content"], answer["usage"]["completion_tokens"]


def first(url: str, asked: Mapping[str, object]) -> float:
    """Seconds to the first text of a stream, all of which is read."""
    start, found = time.monotonic(), None
    with httpx.stream(
        "POST",
        f"{url}/v1/chat/completions",
        json={**asked, "stream": True},
        timeout=600,
        trust_env=False,
    ) as stream:
        for line in stream.iter_lines():
            if found is None and _has_text(line):
                found = time.monotonic() - start
    return found if found is not None else time.monotonic() - start


def _has_text(line: str) -> bool:
    data = line.removeprefix("data: ")
    if not data.startswith("{"):
        return False
    choices = json.loads(data).get("choices") or [{}]
    return bool((choices[0].get("delta") or {}).get("content"))


def cpu_seconds(process: psutil.Process) -> float:
    """Of a server and its children."""
    every = [process, *process.children(recursive=True)]
    return sum(sum(one.cpu_times()[:2]) for one in every)


def measured(server: Server, asked: Sequence[Mapping[str, object]]) -> Round:
    """One round of all clients together."""
    url, process = server
    with ThreadPoolExecutor(len(asked)) as pool:
        before, start = cpu_seconds(process), time.monotonic()
        tokens = sum(count for _, count in pool.map(lambda one: answered(url, one), asked))
        seconds, cpu = time.monotonic() - start, cpu_seconds(process) - before
        waits = list(pool.map(lambda one: first(url, one), asked))
    return Round(tokens / seconds, tokens / cpu, waits)


def beside(counts: Sequence[int], clients: Sequence[int], arguments: argparse.Namespace) -> None:
    """Adapters of one base, whose requests come at a time; with ``--other``, also by the code of
    another tree. All servers are up and take turns."""
    with tempfile.TemporaryDirectory(prefix="adapters-") as name, ExitStack() as stack:
        root = Path(name)
        model = root / "model"
        make_model(model, make_dataset(root / "data", 400), hidden=256, layers=6)
        command, _ = commands(model, None)["surefoot"]
        for number in range(max(counts)):
            folder = root / f"adapter{number}"
            make_adapter(model, folder, seed=number, rank=8)
            command = [*command, "--adapter", f"{folder.name}={folder}"]
        environments: dict[str, dict[str, str]] = {"this tree": {}}
        if arguments.other:
            environments["the other"] = {"PYTHONPATH": arguments.other}
        servers = {}
        for number, (subject, own) in enumerate(environments.items()):
            port, log = 18_000 + os.getpid() % 1000 * 10 + number, root / f"{number}.log"
            server = started("surefoot", command, own, port, log)
            servers[subject] = stack.enter_context(server)
            answered(servers[subject][0], of_adapters(1, 0, 4))
        found: dict[tuple[int, int, str], list[Round]] = {}
        for _ in range(arguments.repetitions):
            for key in ((k, n, subject) for k in counts for n in clients for subject in servers):
                asked = [of_adapters(key[0], i, arguments.tokens) for i in range(key[1])]
                found.setdefault(key, []).append(measured(servers[key[2]], asked))
                say(f"{key}: {found[key][-1].per_second:.0f} tokens/s")
    print(f"{machine()}; {versions('surefoot', 'transformers', 'torch', 'peft')}.")
    rows = [
        [
            *(str(number) for number in key[:2]),
            key[2],
            spread([one.per_second for one in values], 0),
            spread([one.per_cpu_second for one in values], 0),
        ]
        for key, values in found.items()
    ]
    print(table(["adapters", "clients", "code", "tokens/s", "tokens/CPU s"], rows))


def soak(minutes: float, pause: float) -> None:
    """Mixed requests to one server; ends with an error if it keeps what it has taken."""
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        root = Path(name)
        make_model(root / "model", make_dataset(root / "data", 400), hidden=64, layers=2)
        adapters = [root / f"adapter{number}" for number in range(4)]
        for number, folder in enumerate(adapters):
            make_adapter(root / "model", folder, seed=number, rank=2 ** (number + 1))
        command, own = commands(root / "model", None)["surefoot"]
        command = [*command, "--adapter", f"{STEADY}={adapters[0]}"]
        port, log = 17_000 + os.getpid() % 1000, root / "log"
        with started("surefoot", command, own, port, log) as (url, process):
            moments, found = soaked(url, process, adapters, minutes, pause)
        say(log.read_text()[-2000:])
    print(f"{machine()}; {versions('surefoot', 'transformers', 'torch', 'peft')}.")
    print(report(moments, found))
    if wrong := problems(moments, found.wrong):
        raise SystemExit("\n".join(wrong))


def all_started(
    stack: ExitStack, root: Path, model: Path, arguments: argparse.Namespace
) -> dict[str, Server]:
    """The servers that start and answer."""
    found = {}
    only = tuple((arguments.servers or "").split(","))
    every = commands(model, arguments.llamafactory).items()
    subjects = [(subject, how) for subject, how in every if subject.startswith(only)]
    for number, (subject, (command, own)) in enumerate(subjects):
        log, port = root / f"{number}.log", 18_000 + os.getpid() % 1000 * 10 + number
        try:
            server = stack.enter_context(started(subject, command, own, port, log))
            answered(server[0], body(subject, model, 0, 4))
            found[subject] = server
        except (RuntimeError, httpx.HTTPError) as error:
            print(f"{subject} is left out: {error}\n{log.read_text()[-600:]}", file=sys.stderr)
    return found


def say_whether_equal(servers: Mapping[str, Server], model: Path, tokens: int) -> None:
    """Print how many answers of each server are those of the first one."""
    texts = {
        subject: [answered(url, body(subject, model, i, tokens))[0] for i in range(NUM_COMPARED)]
        for subject, (url, _) in servers.items()
    }
    first = next(iter(texts))
    for subject, found in texts.items():
        count = sum(one == other for one, other in zip(found, texts[first], strict=True))
        print(f"{subject}: {count} of {NUM_COMPARED} answers are those of {first}")


def compared(clients: Sequence[int], arguments: argparse.Namespace) -> None:
    """Servers of the same weights, which take turns."""
    with tempfile.TemporaryDirectory(prefix="serve-") as name, ExitStack() as stack:
        root = Path(name)
        model = root / "model"
        make_model(model, make_dataset(root / "data", 400), **SIZES[arguments.size])
        servers = all_started(stack, root, model, arguments)
        say_whether_equal(servers, model, arguments.tokens)
        found: dict[tuple[int, str], list[Round]] = {}
        for _ in range(arguments.repetitions):
            for count, subject in ((count, subject) for count in clients for subject in servers):
                asked = [body(subject, model, i, arguments.tokens) for i in range(count)]
                found.setdefault((count, subject), []).append(measured(servers[subject], asked))
                say(f"{count} {subject}: {found[count, subject][-1].per_second:.0f} tokens/s")
    print(f"{machine()}; {versions('surefoot', 'transformers', 'torch')}.")
    rows = []
    for (count, subject), values in found.items():
        pairs = list(zip(found[count, next(iter(servers))], values, strict=True))
        waits = np.percentile([wait for one in values for wait in one.waits], [50, 95])
        rows.append(
            [
                subject,
                str(count),
                spread([one.per_second for one in values], 0),
                spread([one.per_cpu_second for one in values], 0),
                *(f"{wait:.2f}" for wait in waits),
                spread([ours.per_second / one.per_second for ours, one in pairs]),
                spread([ours.per_cpu_second / one.per_cpu_second for ours, one in pairs]),
            ]
        )
    head = ["server", "clients", "tokens/s", "tokens/CPU s", "first token, p50 s", "p95 s"]
    head += ["times, tokens/s", "times, tokens/CPU s"]
    print(table(head, rows))


def main() -> None:
    """Measure what the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--clients", default="1,8,32")
    parser.add_argument("--tokens", type=int, default=64, help="of each response")
    parser.add_argument("--size", choices=list(SIZES), default="5M", help="of the model")
    parser.add_argument("--llamafactory", help="its command: VENV/bin/llamafactory-cli")
    parser.add_argument("--servers", help="only those whose names begin so: surefoot,llamafactory")
    parser.add_argument("--soak", type=float, metavar="MINUTES", help="mixed requests for so long")
    parser.add_argument("--pause", type=float, default=1.0, help="of a client of --soak, seconds")
    parser.add_argument("--adapters", help="of one base, beside each other: 1,2,4,8")
    parser.add_argument("--other", help="the src folder of another tree, for --adapters")
    arguments = parser.parse_args()
    clients = [int(one) for one in arguments.clients.split(",")]
    if arguments.soak:
        soak(arguments.soak, arguments.pause)
    elif arguments.adapters:
        beside([int(one) for one in arguments.adapters.split(",")], clients, arguments)
    else:
        compared(clients, arguments)


if __name__ == "__main__":
    main()
