"""Models of the hub: the files that a name means, their download into the hub's cache, and its content. The cache, the
endpoint and by default the token are huggingface_hub's: HF_HOME, HF_ENDPOINT, HF_TOKEN."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from errno import EACCES, EDQUOT, EEXIST, ENOSPC, ENOTDIR, EROFS
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from pipeinfer.errors import UserError
from pipeinfer.text import size_text

PREFIX = "hf:"  # the beginning of a path that is the name of a model on the hub
USUAL = ("Q4_K_M", "Q8_0")  # quantisations for names without one, the first there is; else the first file is taken
COMPANIONS = ("mmproj", "imatrix", "mtp-", "eagle3-", "dflash-", "dspark-")
"""Parts of the names of GGUF files that are no models by themselves."""

REPO = re.compile(r"(?!.*(--|\.\.|\.git$))\b[\w.-]{1,96}\b/\b[\w.-]{1,96}\b", re.ASCII)
"""The hub's rule for names of repositories."""

PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)
TAG = re.compile(r"[-.]([A-Za-z0-9_]+)$")

TOKEN = "give the token of who may have it with HF_TOKEN or -hft"
TIMEOUT_S = 10
NO_PLACE = (ENOSPC, EACCES, EROFS, EDQUOT, ENOTDIR, EEXIST)


# -- names


@dataclass(frozen=True, slots=True)
class HubName:
    """A repository `user/model`, and a quantisation or the path of a file in it; neither: the usual quantisation."""

    repo: str
    quant: str = ""
    file: str = ""

    def __str__(self) -> str:
        which = self.file or self.quant
        return f"{self.repo}:{which}" if which else self.repo

    @property
    def path(self) -> Path:
        """The name as a path in options, until its files are downloaded."""
        return Path(f"{PREFIX}{self}")


def parse_name(text: str) -> HubName:
    """`user/model`, `user/model:QUANT` or `user/model:FILE.gguf`. Raises UserError."""
    repo, _, which = text.partition(":")
    if not REPO.fullmatch(repo) or (":" in text and not which):
        raise UserError(f"{text!r} is no model on the hub; write USER/MODEL, or USER/MODEL:Q8_0 for a quantisation")
    return HubName(repo, file=which) if which.lower().endswith(".gguf") else HubName(repo, which)


def name_of(path: Path) -> HubName | None:
    """The name in an option's path; None for a file. Raises UserError for neither."""
    text = str(path)
    return parse_name(text.removeprefix(PREFIX)) if text.startswith(PREFIX) else None


def quant_of(file: str) -> str:
    """The quantisation in a file's name; empty if there is none."""
    part = PART.fullmatch(file)
    stem = Path(part[1] if part else file).name.removesuffix(".gguf")
    match = TAG.search(stem)
    return match[1].upper() if match else ""


def is_model(file: str) -> bool:
    """Whether a file is a model, or a part of one, by its name."""
    name = Path(file).name
    return name.lower().endswith(".gguf") and not any(word in name for word in COMPANIONS)


def parts_of(first: str, files: Sequence[str]) -> list[str]:
    """The parts of a split model that are among `files`, in order; the file alone if it is not split."""
    match = PART.fullmatch(first)
    if match is None:
        return [first]
    parts = [PART.fullmatch(file) for file in sorted(files)]
    return [part[0] for part in parts if part and (part[1], part[3]) == (match[1], match[3])]


def n_parts(file: str) -> int:
    """The number of parts of a model, by the name of one."""
    match = PART.fullmatch(file)
    return int(match[3]) if match else 1


def choose_files(name: HubName, sizes: Mapping[str, int]) -> list[str]:
    """The files that a name means among those of the repository, all parts of a split model in order, as in llama.cpp.
    `sizes`: of all files, by their paths. Raises UserError, with the models that there are."""
    parts = {file: PART.fullmatch(file) for file in sorted(sizes) if is_model(file)}
    models = [file for file, part in parts.items() if part is None or int(part[2]) == 1]
    if name.file:
        chosen = name.file if name.file in sizes else None
    else:
        # llama.cpp's rule: the first path with the quantisation's name before a dot or a dash
        quants = [re.escape(quant) + "[.-]" for quant in ([name.quant] if name.quant else USUAL)]
        matches = (file for quant in quants for file in models if re.search(quant, file, re.IGNORECASE))
        chosen = next(matches, None if name.quant else next(iter(models), None))
    if chosen is None:
        n_bytes = {file: sum(sizes[part] for part in parts_of(file, list(sizes))) for file in models}
        shown = {file: file if name.file else quant_of(file) or file for file in models}
        there = ", ".join(f"{shown[file]} ({size_text(n_bytes[file])})" for file in models)
        way_out = f"there are {there}" if there else "look for a repository with GGUF files"
        raise UserError(f"{name.repo} has no {name.file or name.quant or 'GGUF file of a model'}; {way_out}")
    files = parts_of(chosen, list(sizes))
    if len(files) != n_parts(chosen):
        raise UserError(f"of {n_parts(chosen)} parts of {chosen} {name.repo} has {len(files)}; take another file")
    return files


# -- downloads and the cache


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model in the cache. `is_whole`: it has all of its parts."""

    repo: str
    quant: str
    path: Path
    n_bytes: int
    is_whole: bool


class Unreachable(Exception):
    """The hub does not answer; the message has the reason."""


def fetch(name: HubName, offline: bool, on_notice: Callable[[str], object], token: str | None = None) -> Path:
    """The file that a name means, the first of a split model; files that the cache lacks are downloaded. If the hub
    cannot be reached, with a line to `on_notice`, or if `offline`, the cache alone is searched. Raises UserError."""
    hub = _library()
    if offline or hub.constants.HF_HUB_OFFLINE:
        return _cached(hub, name, f"it is not asked ({'--offline' if offline else 'HF_HUB_OFFLINE'})")
    try:
        cache = hub.constants.HF_HUB_CACHE
        ask = partial(hub.HfApi(token=token).model_info, name.repo, files_metadata=True, timeout=TIMEOUT_S)
        info = _query(hub, name, ask)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings}
        files = choose_files(name, sizes)
        paths = [hub.try_to_load_from_cache(name.repo, file, cache, info.sha) for file in files]
        if not all(isinstance(path, str) for path in paths):
            more = f" and {len(files) - 1} more parts" if len(files) > 1 else ""
            size = size_text(sum(sizes[file] for file in files))
            on_notice(f"downloading {name.repo}: {files[0]}{more} ({size}), into {cache}")
            download = partial(hub.hf_hub_download, name.repo, cache_dir=cache, token=token)
            paths = [_query(hub, name, partial(download, file)) for file in files]
        return Path(paths[0])
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
        way_out = "pip install 'pipeinfer[hub]', or download the GGUF file and give it with -m FILE"
        raise UserError(f"models of the hub need the package huggingface_hub: {way_out}") from None
    return huggingface_hub


def _query(hub: ModuleType, name: HubName, ask: Callable[[], object]) -> Any:
    """The hub's answer. Raises UserError if it refuses, Unreachable if it does not answer."""
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
    except (errors.HTTPError, errors.LocalEntryNotFoundError, RuntimeError) as error:  # hf_xet's have no class
        raise Unreachable(f"{endpoint} cannot be reached ({_first_line(error)})") from None
    except (ImportError, ValueError) as error:
        way_out = "check HF_ENDPOINT, the token, and the proxies (HTTPS_PROXY, ALL_PROXY)"
        raise Unreachable(f"{endpoint} cannot be asked ({_first_line(error)}); {way_out}") from None
    except OSError as error:
        if error.errno in NO_PLACE:
            cache = f"the hub's cache {hub.constants.HF_HUB_CACHE}"
            way_out = "make room there, or name another one with HF_HOME"
            raise UserError(f"{cache} cannot be written: {error.strerror}; {way_out}") from None
        raise Unreachable(f"{endpoint} cannot be reached ({_first_line(error)})") from None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _cached(hub: ModuleType, name: HubName, reason: str) -> Path:
    """The file that a name means among those in the cache. `reason`: why the hub is not searched. Raises UserError."""
    revision = _revision(hub, name.repo)
    files = {} if revision is None else _files(revision)
    if not any(map(is_model, files)):
        way_out = "download it once where the hub can be asked, or give a GGUF file"
        raise UserError(f"{name.repo} is not in the hub's cache {hub.constants.HF_HUB_CACHE}, and {reason}; {way_out}")
    try:
        (first, *_) = choose_files(name, {file: path.stat().st_size for file, path in files.items()})
    except UserError as error:
        raise UserError(f"the hub: {reason}; in its cache {error}") from None
    return files[first]


def _repos(hub: ModuleType) -> list[Any]:
    try:
        cache = hub.scan_cache_dir(hub.constants.HF_HUB_CACHE)
    except (hub.errors.CacheNotFound, ValueError):  # there is none, or a file in its place
        return []
    except OSError as error:
        place = f"the hub's cache {hub.constants.HF_HUB_CACHE}"
        way_out = "give the .gguf file, or name another cache with HF_HOME"
        raise UserError(f"{place} cannot be read: {error.strerror} ({error.filename}); {way_out}") from None
    return sorted((repo for repo in cache.repos if repo.repo_type == "model"), key=lambda repo: repo.repo_id)


def _revision(hub: ModuleType, repo_id: str) -> Any:
    """The revision main in the cache, else the newest one; None without any."""
    repo = next((repo for repo in _repos(hub) if repo.repo_id == repo_id), None)
    if repo is None or not repo.revisions:
        return None
    return max(repo.revisions, key=lambda each: ("main" in each.refs, each.last_modified))


def _files(revision: Any) -> dict[str, Path]:
    """Path in the repository -> file in the cache."""
    return {file.file_path.relative_to(revision.snapshot_path).as_posix(): file.file_path for file in revision.files}


def cached_models() -> list[CachedModel]:
    """All models in the cache, by name. Raises UserError without huggingface_hub."""
    hub, models = _library(), []
    for repo in _repos(hub):
        for revision in sorted(repo.revisions, key=lambda each: -each.last_modified):
            files = _files(revision)
            for file in sorted(filter(is_model, files)):
                parts = parts_of(file, list(files))
                if file == parts[0]:
                    n_bytes = sum(files[part].stat().st_size for part in parts)
                    is_whole = len(parts) == n_parts(file)
                    models.append(CachedModel(repo.repo_id, quant_of(file), files[file], n_bytes, is_whole))
    return models
