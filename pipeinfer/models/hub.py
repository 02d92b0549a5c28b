"""Models of the hub: their files downloaded into its cache, and what lies there. Knows no options.

The cache, the endpoint and the token are huggingface_hub's: HF_HOME, HF_ENDPOINT, HF_TOKEN.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from errno import EACCES, EDQUOT, EEXIST, ENOSPC, ENOTDIR, EROFS
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from pipeinfer.errors import UserError
from pipeinfer.models.hub_names import HubName, choose_files, is_model, n_parts, parts_of, quant_of
from pipeinfer.sizes import size_text

TOKEN = "give the token of who may have it with HF_TOKEN or -hft"
TIMEOUT_S = 10
NO_PLACE = (ENOSPC, EACCES, EROFS, EDQUOT, ENOTDIR, EEXIST)

Notice = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model in the cache. `is_whole`: all of its parts are there."""

    repo: str
    quant: str
    path: Path
    n_bytes: int
    is_whole: bool


class Unreachable(Exception):
    """The hub does not answer, or shall not be asked; the message says why."""


def fetch(name: HubName, offline: bool, on_notice: Notice) -> Path:
    """The file that a name means, the first of a split model: what is not in the cache is downloaded.

    Where the hub cannot be reached, or shall not be asked (`offline`), what is in the cache does, with a line to
    `on_notice`. Raises UserError.
    """
    hub = _library()
    if offline or hub.constants.HF_HUB_OFFLINE:
        return _cached(hub, name, f"it is not asked ({'--offline' if offline else 'HF_HUB_OFFLINE'})")
    try:
        cache = hub.constants.HF_HUB_CACHE
        ask = partial(hub.HfApi().model_info, name.repo, files_metadata=True, timeout=TIMEOUT_S)
        info = _asked(hub, name, ask)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings}
        files = choose_files(name, sizes)
        known = [hub.try_to_load_from_cache(name.repo, file, cache, info.sha) for file in files]
        if not all(isinstance(path, str) for path in known):
            on_notice(f"downloading {name.repo}: {_told(files, sizes)}, into {cache}")
            download = partial(hub.hf_hub_download, name.repo, cache_dir=cache)
            known = [_asked(hub, name, partial(download, file)) for file in files]
        return Path(known[0])
    except Unreachable as error:
        path = _cached(hub, name, str(error))
        on_notice(f"{name.repo}: {error}; what the cache has is used")
        return path


def _library() -> ModuleType:
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
    except ImportError:
        raise UserError("models of the hub need the package huggingface_hub: pip install 'pipeinfer[hub]', or download "
                        "the GGUF file and give it with -m FILE") from None  # fmt: skip
    return huggingface_hub


def _told(files: list[str], sizes: Mapping[str, int]) -> str:
    n_bytes = sum(sizes[file] for file in files)
    return f"{files[0]}{f' and {len(files) - 1} more parts' if len(files) > 1 else ''} ({size_text(n_bytes)})"


def _asked(hub: ModuleType, name: HubName, ask: Callable[[], object]) -> Any:
    """What the hub answers. Raises UserError for what it refuses, Unreachable where it does not answer."""
    errors, endpoint = hub.errors, hub.constants.ENDPOINT
    try:
        return ask()
    except errors.GatedRepoError:
        raise UserError(f"{name.repo} is gated: ask for access at {endpoint}/{name.repo}; {TOKEN}") from None
    except errors.RepositoryNotFoundError:
        raise UserError(f"{endpoint} has no model {name.repo}; check the name, or if it is private {TOKEN}") from None
    except errors.RemoteEntryNotFoundError:
        raise UserError(f"a file of {name.repo} is no longer there; start again") from None
    except errors.HfHubHTTPError as error:
        code = error.response.status_code
        if code >= 500:
            raise Unreachable(f"{endpoint} answers with error {code}") from None
        raise UserError(f"{endpoint} answers with error {code} when asked for {name.repo}; {TOKEN}") from None
    except (errors.HTTPError, errors.LocalEntryNotFoundError) as error:
        raise Unreachable(f"{endpoint} cannot be reached ({_first_line(error)})") from None
    except OSError as error:
        if error.errno in NO_PLACE:
            raise UserError(f"the hub's cache {hub.constants.HF_HUB_CACHE} cannot be written: {error.strerror}; make "
                            "room there, or name another one with HF_HOME") from None  # fmt: skip
        raise Unreachable(f"{endpoint} cannot be reached ({_first_line(error)})") from None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _cached(hub: ModuleType, name: HubName, why: str) -> Path:
    """The file that a name means among those in the cache. `why`: no other is looked for. Raises UserError."""
    revision = _revision(hub, name.repo)
    files = {} if revision is None else _files(revision)
    if not any(map(is_model, files)):
        raise UserError(
            f"{name.repo} is not in the hub's cache {hub.constants.HF_HUB_CACHE}, and {why}; "
            "download it once where the hub can be asked, or give a GGUF file"
        )
    try:
        (first, *_) = choose_files(name, {file: path.stat().st_size for file, path in files.items()})
    except UserError as error:
        raise UserError(f"the hub: {why}; in its cache {error}") from None
    return files[first]


def _repos(hub: ModuleType) -> list[Any]:
    try:
        found = hub.scan_cache_dir(hub.constants.HF_HUB_CACHE)
    except (hub.errors.CacheNotFound, ValueError):  # there is none, or a file in its place
        return []
    return sorted((repo for repo in found.repos if repo.repo_type == "model"), key=lambda repo: repo.repo_id)


def _revision(hub: ModuleType, repo_id: str) -> Any:
    """The one in the cache that is called main, else the newest; None where there is none."""
    repo = next((repo for repo in _repos(hub) if repo.repo_id == repo_id), None)
    if repo is None or not repo.revisions:
        return None
    return max(repo.revisions, key=lambda each: ("main" in each.refs, each.last_modified))


def _files(revision: Any) -> dict[str, Path]:
    """By their paths in the repository."""
    return {file.file_path.relative_to(revision.snapshot_path).as_posix(): file.file_path for file in revision.files}


def cached_models() -> list[CachedModel]:
    """All in the cache, by name. Raises UserError without huggingface_hub."""
    hub, found = _library(), []
    for repo in _repos(hub):
        for revision in sorted(repo.revisions, key=lambda each: -each.last_modified):
            files = _files(revision)
            for file in sorted(filter(is_model, files)):
                parts = parts_of(file, list(files))
                if file == parts[0]:
                    n_bytes = sum(files[part].stat().st_size for part in parts)
                    whole = len(parts) == n_parts(file)
                    found.append(CachedModel(repo.repo_id, quant_of(file), files[file], n_bytes, whole))
    return found
