"""How a server is started: what it serves, and its limits."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...board.host_names import Hosts
from ...use.model_loading import Dtype


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """The options of ``surefoot serve``."""

    path: str
    name: str | None = None  # by which requests name it
    base: str | None = None
    adapters: tuple[tuple[str, str], ...] = ()  # names and folders
    dtype: Dtype = "auto"
    trust_remote_code: bool = False
    max_batch: int = 32  # responses that are generated at a time, of each model
    max_waiting: int = 256  # responses that wait at a time
    max_models: int = 2  # in memory at a time, beside adapters of one base
    max_length: int | None = None  # tokens of prompt and response
    max_body: int = 8 << 20  # bytes of a request
    sampled_logprobs: bool = False  # log-probabilities after penalties and temperature
    api_key: str | None = field(default=None, repr=False)
    hosts: Hosts = field(default_factory=Hosts)  # under which requests are answered
