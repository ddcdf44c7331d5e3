"""Uploads to ModelScope's hub: large contents by their sha256, then one commit for all files.

These are the requests of its own package (`create_model`, `objects/batch`, `commit`). What the hub
has already is not sent again.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from typing import Any
from urllib.parse import urlencode, urlsplit

from .file_download import SECONDS, HubError, NotReachedError, request
from .modelscope import endpoint, files_of, secrets
from .upload import LocalFile, LostConnectionError, RemoteEntry, Repository

PRIVATE, PUBLIC = 1, 5  # ModelScope's numbers of a visibility
LARGE = 1 << 20  # bytes; larger files, and those below, are not part of the commit itself
BINARY = (".safetensors", ".gguf", ".bin", ".pt", ".model", ".npz", ".gz", ".zip")
LICENSE = "other"
REVISION = "master"
_DENIED, _TEMPORARY = (401, 403), (408, 429, 500, 502, 503, 504)  # HTTP status


class ModelScopeUpload:
    """Repositories of models on ModelScope, or on the server in MODELSCOPE_ENDPOINT."""

    def url(self, name: str) -> str:
        """The page of a repository."""
        return f"{endpoint()}/models/{name}"

    def find(self, name: str) -> Repository | None:
        """The repository; None if it does not exist."""
        try:
            about = _ask("GET", f"models/{name}", name)
        except _AbsentError:
            return None
        found = {
            str(each["Path"]): RemoteEntry(int(each["Size"]), sha256=str(each["Sha256"] or ""))
            for each in files_of("models", name, REVISION)
        }
        return Repository(about.get("Visibility") != PUBLIC, "", found)

    def read(self, name: str, path: str, at: Repository) -> bytes:
        """A small file of the repository."""
        query = urlencode({"Revision": REVISION, "FilePath": path})
        try:
            with request(f"{endpoint()}/api/v1/models/{name}/repo?{query}", secrets()) as answer:
                return answer.read()
        except (urllib.error.HTTPError, NotReachedError, OSError, HTTPException) as error:
            raise _said(name, error) from error

    def license(self, name: str) -> str | None:
        """The license of a model; None if the hub does not say."""
        try:
            found = _ask("GET", f"models/{name}", name).get("License")
        except HubError:
            return None
        return str(found) if found else None

    def create(self, name: str, *, private: bool) -> None:
        """Create an empty repository."""
        owner, _, last = name.partition("/")
        wanted = {"Path": owner, "Name": last, "Visibility": PRIVATE if private else PUBLIC}
        _ask("POST", "models", name, {**wanted, "ChineseName": None, "License": LICENSE})

    def commit(
        self, name: str, at: Repository, added: Sequence[LocalFile], removed: Sequence[str]
    ) -> None:
        """Upload contents that the hub does not have, commit all files, then remove others."""
        large = [file for file in added if is_large(file)]
        self._send(name, large)
        actions = [_action(file, is_large=file in large) for file in added]
        if actions:
            message = {"commit_message": "Upload with Surefoot", "actions": actions}
            _ask("POST", f"repos/models/{name}/commit/{REVISION}", name, message)
        for path in removed:
            query = urlencode({"Revision": REVISION, "FilePath": path})
            _ask("DELETE", f"models/{name}/file?{query}", name)

    def _send(self, name: str, large: Sequence[LocalFile]) -> None:
        for file in large:
            about = {"oid": file.sha256, "size": file.size}
            batch = {"operation": "upload", "objects": [about]}
            answer = _ask("POST", f"repos/models/{name}/info/lfs/objects/batch", name, batch)
            for each in answer["objects"]:
                action = (each.get("actions") or {}).get("upload")
                if action:
                    _put(name, str(action["href"]), file)


class _AbsentError(HubError):
    """The repository does not exist."""


def is_large(file: LocalFile) -> bool:
    """Whether a file is stored outside of git."""
    return file.size > LARGE or file.path.endswith(BINARY)


def _action(file: LocalFile, *, is_large: bool) -> Mapping[str, object]:
    about = {"action": "create", "path": file.path, "size": file.size}
    if is_large:
        return {**about, "type": "lfs", "sha256": file.sha256, "content": "", "encoding": ""}
    content = {"sha256": "", "content": file.base64(), "encoding": "base64"}
    return {**about, "type": "normal", **content}


def _ask(method: str, path: str, name: str, body: object = None) -> Mapping[str, Any]:
    """The data of an answer. Raises ``HubError``."""
    asked = urllib.request.Request(
        f"{endpoint()}/api/v1/{path}",
        data=None if body is None else json.dumps(body).encode(),
        headers={"User-Agent": "surefoot", "Content-Type": "application/json", **secrets()},
        method=method,
    )
    return _answered(name, asked)


def _put(name: str, url: str, file: LocalFile) -> None:
    """Send the content of a file. The token is for ModelScope's own servers."""
    own = urlsplit(endpoint()).hostname or ""
    host = urlsplit(url).hostname or ""
    is_own = host == own or host.endswith("." + own.removeprefix("www."))
    with file.open() as opened:
        asked = urllib.request.Request(
            url,
            data=opened,
            headers={"Content-Length": str(file.size), **(secrets() if is_own else {})},
            method="PUT",
        )
        _answered(name, asked)


def _answered(name: str, asked: urllib.request.Request) -> Mapping[str, Any]:
    try:
        with urllib.request.urlopen(asked, timeout=SECONDS) as answer:
            said = json.loads(answer.read() or b"{}")
    except (urllib.error.HTTPError, OSError, HTTPException) as error:
        raise _said(name, error) from error
    except ValueError as error:
        raise HubError(f"{name}: not an answer of ModelScope ({error})") from error
    if said.get("Code", 200) != 200 or said.get("Success") is False:
        raise HubError(f"{name}: ModelScope refuses: {said.get('Message') or said}")
    found = said.get("Data")
    return found if isinstance(found, dict) else {}


def _said(name: str, error: Exception) -> HubError:
    if not isinstance(error, urllib.error.HTTPError):
        return LostConnectionError(f"{endpoint()}: connection lost ({error})")
    if error.code == 404:
        return _AbsentError(f"ModelScope has no {name}")
    if error.code in _DENIED:
        return HubError(
            f"{name}: ModelScope refuses the upload ({error.code}); set MODELSCOPE_API_TOKEN to a "
            "token of an account that may write to it"
        )
    said = f"{name}: ModelScope answers {error.code} {error.reason}"
    return LostConnectionError(said) if error.code in _TEMPORARY else HubError(said)
