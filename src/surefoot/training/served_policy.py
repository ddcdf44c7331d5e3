"""The policy in a server: it gets the weights after each update, and samples with them.

Rank 0 talks to the server, and the others get the samples. What has arrived is on the disk before
it is trained on, so a run whose server ends, or that is killed itself, samples nothing twice.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

from ..checkpoint.disk.commit import committed, step_of
from ..checkpoint.disk.manifest import Kind
from ..checkpoint.saving.preparation import WriterGroup, save
from ..checkpoint.state.roles import MODEL
from ..errors import RunError, SurefootError, counted
from ..generate.generation import room
from ..generate.section import GenerateSection, Ids, Sample
from ..generate.servers import Expected, SamplingRequest, SamplingServer, ServedWeights
from ..network.network import Network
from ..parallel.world import World
from ..storage import files

FOLDER = "served"  # in that of the run: the weights that the server reads
JOURNAL = "sampled"  # in that of the run: the responses that are not trained on yet
_NAME = re.compile(r"window-\d+-\d+-after-(\d+)\.jsonl")
_LIMIT = 1 << 34  # bytes that are read back


@dataclass(frozen=True)
class WindowRequest:
    """The prompts of a window to which responses are sampled."""

    place: tuple[int, int]  # of the window; evaluations have a negative epoch
    version: int  # optimizer steps behind the weights
    prompts: Sequence[Ids]
    settings: GenerateSection
    turn: int
    stops: Sequence[int]


@dataclass
class ServedPolicy:
    """The policy of a run, sampled by ``server``. Its methods are collective calls."""

    server: SamplingServer
    network: Network
    run: Path  # its folder
    kind: Kind  # of its checkpoints
    companions: dict[str, bytes]  # the small files beside the weights
    writers: WriterGroup
    world: World
    lineage: str  # what the weights after a number of steps depend on
    _loaded: ServedWeights | None = field(default=None, init=False)
    _version: int | None = field(default=None, init=False)  # of ``_loaded``

    def generate(self, request: WindowRequest) -> list[Sample]:
        """One sample for each prompt. Raises ``RunError``."""
        if self._version is not None and request.version < self._version:
            self._version = None  # after a rollback, later steps have other weights than before
        journal = None
        if request.place[0] >= 0:  # not an evaluation, which is sampled anew after a restart
            journal = ResponseJournal(self.run, request.place, request.version)
        stops = self._stops(request.stops)
        settings = {**asdict(request.settings), "batch_size": None, "stops": stops}
        # Not the weights themselves: on another number of ranks they differ by rounding, and the
        # responses are still those that the run was trained on (docs/decisions/0057).
        key = key_of(self.lineage, request.prompts, settings, request.turn)
        samples = self.world.on_main(lambda: {} if journal is None else journal.read(key))
        if len(samples) < len(request.prompts):
            self._hand_over(request.version)
            samples |= self.world.on_main(lambda: self._sampled(request, samples, journal, key))
        return [samples[index] for index in range(len(request.prompts))]

    def _hand_over(self, version: int) -> None:
        """Make the server read the weights of now, unless it has them."""
        if self._version == version:
            return
        folder = self._written(version)
        # A name of its own for each step and launch: no cache of a server can then answer with the
        # weights of another one.
        name = f"surefoot-{version}-{secrets.token_hex(4)}"
        weights = ServedWeights(folder, name, self.kind == "adapter")
        self._loaded = self.world.on_main(lambda: self._load(weights))
        self._version = version

    def _load(self, weights: ServedWeights) -> ServedWeights:
        try:
            return self.server.load(weights, self._loaded)
        except RunError as error:
            cure = "start the server as docs/how-to/generation.md says, then run the same command"
            raise RunError(f"{error}; {cure} to resume") from None

    def _written(self, version: int) -> Path:
        """The weights of now as files, like those of a checkpoint."""
        root = self.run / FOLDER
        self.world.on_main(lambda: _clear(root))
        folder = save(
            root,
            version,
            {MODEL: self.network.weights},
            kind=self.kind,
            companions=self.companions,
            writers=self.writers,
        )
        self.world.wait()
        return folder.absolute()

    def _sampled(
        self,
        request: WindowRequest,
        existing: dict[int, Sample],
        journal: ResponseJournal | None,
        key: str,
    ) -> dict[int, Sample]:
        """The samples that are not in ``existing``, requested in the order of the prompts; each is
        in the journal as soon as it arrives. The first error is raised once nothing more can."""
        samples, problem, stop = dict[int, Sample](), None, Event()
        if journal is not None:
            journal.forget_older()
        groups = _groups(request.prompts, existing)
        with ThreadPoolExecutor(self.server.concurrency) as pool:
            futures = {pool.submit(self._ask, request, g, stop): at for g, at in groups.items()}
            for future in as_completed(futures):
                try:
                    arrived = dict(zip(futures[future], future.result(), strict=True))
                    if journal is not None:
                        journal.add(key, arrived)
                except SurefootError as error:
                    problem = problem or error
                    stop.set()
                    continue
                samples |= arrived
        if problem is not None:
            raise RunError(
                self._failure_message(problem, len(existing) + len(samples), request, journal)
            )
        return samples

    def _ask(
        self, request: WindowRequest, group: tuple[tuple[int, ...], int], stop: Event
    ) -> list[Sample]:
        """The samples for a prompt. Raises ``RunError``."""
        prompt, count = group
        if stop.is_set():
            raise RunError("not sent, as another request has failed")
        space, most = room(self.network.module, prompt), request.settings.max_new_tokens
        if space == 0:
            return [Sample((), (), "context", version=request.version)] * count
        allowed = most if space is None else min(space, most)
        assert self._loaded is not None
        sampling_request = SamplingRequest(
            prompt, count, allowed, request.settings.temperature, self._stops(request.stops)
        )
        vocabulary = self.network.inner.config.get_text_config().vocab_size
        expected = Expected(
            self.server.url,
            sampling_request,
            self._loaded,
            vocabulary,
            request.version,
            "length" if allowed == most else "context",
        )
        return expected.samples(self.server.sample(sampling_request, self._loaded))

    def _stops(self, stops: Sequence[int]) -> list[int]:
        return list(dict.fromkeys([*stops, *self.network.own_stops]))

    def _failure_message(
        self, error: Exception, count: int, request: WindowRequest, journal: ResponseJournal | None
    ) -> str:
        """What is lost by ``error``, and what to do."""
        cure = "start or repair the server, then run the same command to resume"
        if journal is None or not count:
            return f"{error}; {cure}"
        progress = f"{counted(count, 'response')} of {len(request.prompts)}"
        return f"{error}; the {progress} that the window has so far are in {journal.path}: {cure}"


def _clear(root: Path) -> None:
    """Delete the weights that the server has read before."""
    with files.raising(RunError, "cannot delete the weights that were served"):
        if files.exists(root):
            files.remove_tree(root)


def _groups(
    prompts: Sequence[Ids], existing: dict[int, Sample]
) -> dict[tuple[tuple[int, ...], int], list[int]]:
    """The places without a sample of each prompt, by it and their number."""
    places = dict[tuple[int, ...], list[int]]()
    for index, prompt in enumerate(prompts):
        if index not in existing:
            places.setdefault(tuple(prompt), []).append(index)
    return {(prompt, len(at)): at for prompt, at in places.items()}


@dataclass(frozen=True)
class ResponseJournal:
    """The responses of one window, sampled with the weights after ``version`` optimizer steps, on
    the disk before anything is trained on them: ``window-EPOCH-INDEX-after-STEP.jsonl``, one
    response per line. A server does not sample the same responses twice, so each is flushed as it
    arrives, and a run that is resumed before the window reads it again."""

    run: Path
    place: tuple[int, int]  # of the window
    version: int

    @property
    def path(self) -> Path:
        """Its file."""
        epoch, index = self.place
        return self.run / JOURNAL / f"window-{epoch}-{index}-after-{self.version}.jsonl"

    def read(self, key: str) -> dict[int, Sample]:
        """The responses to requests of this ``key``, by index. Raises ``RunError``."""
        with files.raising(RunError, "cannot read the responses of a window"):
            if not files.exists(self.path):
                return {}
            with files.open_file(self.path) as file:
                text = files.read_all(file, _LIMIT).decode(errors="replace")
        return {row["index"]: _sample(row) for row in _rows(text) if row["key"] == key}

    def add(self, key: str, samples: Mapping[int, Sample]) -> None:
        """Append responses, and flush them. Raises ``RunError``."""
        rows = [{"key": key, "index": i, **asdict(s)} for i, s in samples.items()]
        lines = [json.dumps({**row, "check": _check(row)}) for row in rows]
        with files.raising(RunError, "cannot write the responses of a window"):
            files.make_folder(self.path.parent)
            # a line break first, which ends a line that a crash has cut short
            files.append_line(self.path, "\n".join(["", *lines]))
            with files.open_file(self.path) as file:
                file.sync()

    def forget_older(self) -> None:
        """Delete the files of windows from which no checkpoint of the run would be resumed."""
        with files.raising(RunError, "cannot delete the responses of old windows"):
            folder, saved = self.run / JOURNAL, [step_of(path) for path in committed(self.run)]
            for name in files.names_in(folder) if saved else ():
                match = _NAME.fullmatch(name)
                if match and int(match[1]) < min(saved):
                    files.remove_tree(folder / name)


def key_of(lineage: str, prompts: Sequence[Sequence[int]], settings: object, turn: int) -> str:
    """What responses depend on besides the weights of a run with these settings (``lineage``)."""
    inputs = [lineage, [list(map(int, prompt)) for prompt in prompts], settings, turn]
    return files.digest(json.dumps(inputs).encode())


def _check(row: Mapping[str, object]) -> str:
    return files.digest(json.dumps(row, sort_keys=True).encode())


def _rows(text: str) -> Iterator[dict[str, Any]]:
    """The complete lines that are as they were written."""
    for line in text.split("\n"):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and row.pop("check", None) == _check(row):
            yield row


def _sample(row: Mapping[str, Any]) -> Sample:
    ids, logps, log_masses = (tuple(row[name]) for name in ("ids", "logps", "log_masses"))
    return Sample(ids, logps, row["finish_reason"], log_masses, version=row["version"])
