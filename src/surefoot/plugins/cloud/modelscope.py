"""ModelScope, through its package ``modelscope-hub``, which resumes downloads and verifies them.

What is by hand: no file of a hub leaves its folder, and a machine without a network uses only what
was downloaded completely.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from ...errors import installation
from ...storage import files
from ...storage.address import default_cache
from ...storage.hubs import HubError, Kind, offline_setting

logger = logging.getLogger(__name__)


class ModelScope:
    """Models and datasets of ModelScope, or of the mirror in MODELSCOPE_ENDPOINT."""

    def snapshot(
        self,
        kind: Kind,
        name: str,
        *,
        revision: str | None = None,
        patterns: Sequence[str] = ("*",),
        ignored: Sequence[str] = (),
    ) -> Path:
        """The local folder of a model or a dataset; see ``HubClient``."""
        try:
            import modelscope_hub
        except ImportError:
            raise HubError(
                f"{name} is of ModelScope, whose package is missing; "
                f"{installation('modelscope_hub')}, or download it with another program, and name "
                "the folder"
            ) from None
        known = _Complete(f"{kind} {name} {revision} {sorted(patterns)} {sorted(ignored)}")
        if (setting := offline_setting()) is not None:
            return known.folder(
                f"{name} of ModelScope is not on this machine, and {setting} is set; unset "
                f"{setting}, or download it on a machine with a network"
            )
        api = modelscope_hub.HubApi(modelscope_hub.HubConfig())
        repo_type = kind.removesuffix("s")
        try:
            listed = api.list_repo_files(name, repo_type, revision=revision)
            for each in listed:
                if ".." in (path := PurePosixPath(each.path)).parts or path.is_absolute():
                    raise HubError(f"{name} of ModelScope: {each.path!r} is outside of its folder")
            entries = [
                {"Path": each.path, "Size": each.size, "Sha256": each.sha256, "Type": each.type}
                for each in listed
            ]
            folder: Path = api.download_repo(
                name,
                repo_type,
                revision=revision,
                allow_patterns=list(patterns),
                ignore_patterns=list(ignored),
                file_list=entries,
            )
        except modelscope_hub.NetworkError as error:
            found = known.folder(f"ModelScope cannot be reached ({error}); check the network")
            logger.warning("ModelScope cannot be reached; using the copy in %s", found)
            return found
        except modelscope_hub.NotExistError:
            raise HubError(
                f"ModelScope has no {name}, or not this revision; expected owner/name"
            ) from None
        except (modelscope_hub.AuthenticationError, modelscope_hub.PermissionDeniedError):
            raise HubError(
                f"ModelScope refuses {name}; set MODELSCOPE_API_TOKEN to a token of an account "
                "that may read it"
            ) from None
        except (modelscope_hub.HubError, OSError, ValueError) as error:
            raise HubError(f"{name} of ModelScope: {error}") from None
        known.note(folder)
        return folder


class _Complete:
    """Whether a download has ended, noted in the cache of Surefoot."""

    def __init__(self, wanted: str) -> None:
        self._path = default_cache().with_name("modelscope.json")
        self._wanted = wanted

    def folder(self, missing: str) -> Path:
        """The folder. Raises ``HubError`` with ``missing``."""
        folder = Path(self._known().get(self._wanted, ""))
        if not folder.is_absolute() or not folder.is_dir():
            raise HubError(missing)
        return folder

    def note(self, folder: Path) -> None:
        """It is complete."""
        known = {**self._known(), self._wanted: str(folder)}
        with files.raising(HubError, f"cannot write {self._path}"):
            files.make_folder(self._path.parent)
            files.write_aside(self._path, json.dumps(known).encode())

    def _known(self) -> dict[str, str]:
        try:
            return dict(files.read_json(self._path))
        except (OSError, ValueError, TypeError):
            return {}


MODELSCOPE = ModelScope()
