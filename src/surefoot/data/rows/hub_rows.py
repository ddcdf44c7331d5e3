"""Rows of a dataset of the Hugging Face hub or of ModelScope."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies

from ...errors import DataError
from ...storage.hubs import HUBS, HubError, offline_setting
from .formats.fields import Row
from .readers import ROWS, rows_of
from .row_sources import BrokenRow

if TYPE_CHECKING:
    import pyarrow as pa

NOT_NEEDED = ("*.py", ".git*")  # scripts are not run
ADDRESS = re.compile(r"hf://datasets/(?P<name>[^@]+)@(?P<revision>[0-9a-f]{40})/(?P<path>.+)")
SCRIPTS = "Dataset scripts are no longer supported"
HubName = Literal["huggingface", "modelscope"]


@dataclass(frozen=True)
class Hub:
    """A dataset of the Hugging Face hub (or a local folder in its form), or of ModelScope."""

    hub: HubName
    url: str
    subset: str | None = None
    split: str = "train"
    folder: str | None = None
    remarks: ClassVar[tuple[str, ...]] = ()

    def __str__(self) -> str:
        return f"{self.url} ({self.hub})"

    @property
    def as_entry(self) -> str:
        """What names it in an entry."""
        return f"{'ms' if self.hub == 'modelscope' else 'hf'}_hub_url: {self.url}"

    def rows(self) -> Iterator[Row | BrokenRow]:
        """All rows; raises DataError if the dataset cannot be loaded."""
        for table in self._loaded.with_format("arrow").iter(batch_size=ROWS):
            for batch in table.to_batches():
                yield from rows_of(batch)

    def content_hash(self) -> str:
        """The hub library's own fingerprint of what it loaded."""
        return self._loaded._fingerprint

    def stamp(self) -> str:
        """The same: a loaded dataset does not change any more."""
        return self.content_hash()

    @cached_property
    def _loaded(self) -> _HubDataset:
        """The split, as the library of Hugging Face loads it."""
        import datasets

        try:
            dataset: _HubDataset = datasets.load_dataset(
                _downloaded(self), name=self.subset, data_dir=self.folder, split=self.split
            )
        except HubError as error:
            raise DataError(f"cannot load dataset {self}: {error}") from None
        except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
            raise _not_loaded(self, error) from error
        return dataset


class _HubDataset(Protocol):
    _fingerprint: str

    def with_format(self, form: str, /) -> _HubDataset: ...

    def iter(self, batch_size: int) -> Iterator[pa.Table]: ...


def _downloaded(source: Hub) -> str:
    """What the library is to load. Of a dataset that is not prepared yet, the files are downloaded
    and verified before the library may read them."""
    import datasets

    if source.hub == "modelscope":  # as a folder in the form of a hub
        inside = f"{source.folder.strip('/')}/*" if source.folder else "*"
        patterns = (inside, "README.md")
        return str(
            HUBS["modelscope"].snapshot(
                "datasets", source.url, patterns=patterns, ignored=NOT_NEEDED
            )
        )
    config = datasets.config
    _check_network(source, config.HF_ENDPOINT, Path(config.HF_DATASETS_CACHE))
    if Path(source.url).exists():
        return source.url
    builder = datasets.load_dataset_builder(source.url, name=source.subset, data_dir=source.folder)
    named = (builder.config.data_files or {}).values()
    urls = [unquote(str(url)) for names in named for url in names]
    places = [place for url in urls if (place := ADDRESS.fullmatch(url))]
    if places and not Path(builder.cache_dir).exists():
        name, revision = places[0]["name"], places[0]["revision"]
        paths = [place["path"] for place in places if place["name"] == name]
        HUBS["huggingface"].snapshot("datasets", name, revision=revision, patterns=paths)
    return source.url


def _check_network(source: Hub, hub: str, cache: Path) -> None:
    """Raises ``DataError`` if the hub has no address here, and nothing else could have the dataset:
    the library would try again and again for half a minute."""
    is_here = Path(source.url).exists() or (cache / source.url.replace("/", "___")).exists()
    host = urlsplit(hub).hostname
    if is_here:
        return
    if (name := offline_setting()) is not None:
        raise DataError(
            f"cannot load dataset {source}: it is not on this machine, and {name} is set; unset "
            f"{name}, or download it on a machine with a network"
        )
    if getproxies():
        return
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        raise _not_loaded(source, OSError(f"{host}: {error.strerror}")) from error


def _not_loaded(source: Hub, error: Exception) -> DataError:
    hint = "check its name, subset, split and folder, and the network"
    if SCRIPTS in str(error):
        hint = "its rows are made by a script, which is not run; convert it to JSON or Parquet"
    return DataError(f"cannot load dataset {source}: {error}; {hint}")
