"""Uploads to the Hugging Face hub, through huggingface_hub: one commit for all files.

The library asks the hub which contents it has by their hash, and sends the others. So an upload
that was interrupted sends nothing twice, and the repository changes at once or not at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants, hf_hub_url
from huggingface_hub.errors import (  # type: ignore[attr-defined]
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalTokenNotFoundError,
    RepositoryNotFoundError,
)
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

from .file_download import HubError, NotReachedError, request
from .upload import LocalFile, LostConnectionError, RemoteEntry, Repository

_DENIED, _TEMPORARY = (401, 403), (408, 412, 429, 500, 502, 503, 504)  # HTTP status


class HuggingFaceUpload:
    """Repositories of models on the Hugging Face hub, or on the mirror in HF_ENDPOINT."""

    def __init__(self) -> None:
        self._api = HfApi(endpoint=constants.ENDPOINT)

    def url(self, name: str) -> str:
        """The page of a repository."""
        return f"{self._api.endpoint}/{name}"

    def find(self, name: str) -> Repository | None:
        """The repository; None if it does not exist."""
        with _explained(name):
            try:
                about = self._api.model_info(name)
            except RepositoryNotFoundError:
                return None
            listed = self._api.list_repo_tree(name, recursive=True, revision=about.sha)
            found = {each.path: _entry(each) for each in listed if isinstance(each, RepoFile)}
        return Repository(bool(about.private), about.sha or "", found)

    def read(self, name: str, path: str, at: Repository) -> bytes:
        """A small file of the repository."""
        url = hf_hub_url(name, path, revision=at.commit, endpoint=constants.ENDPOINT)
        with _explained(name), request(url, build_hf_headers()) as answer:
            return answer.read()

    def license(self, name: str) -> str | None:
        """The license of a model; None if the hub does not say."""
        try:
            with _explained(name):
                about = self._api.model_info(name).card_data
        except HubError:
            return None
        found = None if about is None else about.get("license")
        return str(found) if found else None

    def create(self, name: str, *, private: bool) -> None:
        """Create an empty repository."""
        with _explained(name):
            self._api.create_repo(name, private=private, exist_ok=True)

    def commit(
        self, name: str, at: Repository, added: Sequence[LocalFile], removed: Sequence[str]
    ) -> None:
        """Upload files and remove others, in one commit."""
        adding = [_addition(file) for file in added]
        each_once = {file.sha256: _addition(file) for file in added}
        removing = [CommitOperationDelete(path_in_repo=path) for path in removed]
        with _explained(name):
            self._api.preupload_lfs_files(name, list(each_once.values()), free_memory=False)
            self._api.create_commit(
                name,
                [*adding, *removing],
                commit_message="Upload with Surefoot",
                parent_commit=at.commit or None,
            )


def _addition(file: LocalFile) -> CommitOperationAdd:
    source = file.source if isinstance(file.source, bytes) else str(file.source)
    return CommitOperationAdd(path_in_repo=file.path, path_or_fileobj=source)


def _entry(file: RepoFile) -> RemoteEntry:
    if file.lfs is not None:
        return RemoteEntry(file.size, sha256=file.lfs.sha256)
    return RemoteEntry(file.size, git=file.blob_id)


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Errors of the library, in one sentence."""
    try:
        yield
    except NotReachedError as error:
        raise LostConnectionError(str(error)) from error
    except (HTTPError, HFValidationError, OSError, RuntimeError) as error:
        raise _said(name, error) from error


def _said(name: str, error: Exception) -> HubError:
    cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
    if isinstance(cause, LocalTokenNotFoundError):
        return _no_token(name)
    if isinstance(cause, HfHubHTTPError):
        return _answered(name, cause)
    if isinstance(cause, HTTPError | OSError):
        said = str(cause) or type(cause).__name__
        return LostConnectionError(f"{constants.ENDPOINT}: connection lost ({said})")
    return HubError(f"{name}: {str(cause).splitlines()[0]}")


def _answered(name: str, error: HfHubHTTPError) -> HubError:
    status = error.response.status_code
    if status in _DENIED:
        return _no_token(name)
    said = f"{name}: the hub answers {status}: {error.server_message or error.response.text[:200]}"
    return LostConnectionError(said) if status in _TEMPORARY else HubError(said)


def _no_token(name: str) -> HubError:
    return HubError(
        f"{name}: the hub refuses the upload; set HF_TOKEN to a token with write access to it, or "
        "run `hf auth login`"
    )
