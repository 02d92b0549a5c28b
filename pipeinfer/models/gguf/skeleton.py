"""A model whose weights are elsewhere: its headers, for who gets the weights of single layers from another host.

Knows no messages.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from pipeinfer.errors import UserError
from pipeinfer.models.gguf.contents import FileState
from pipeinfer.models.gguf.model_info import ModelInfo, read_model_info


@dataclass(frozen=True, slots=True)
class Skeleton:
    """`heads`: of each file all that comes before the weights; `states`: of the files, on the host that has them."""

    path: Path
    names: tuple[str, ...]
    heads: tuple[bytes, ...]
    states: tuple[FileState, ...]
    fingerprint: str


def take_skeleton(info: ModelInfo) -> Skeleton:
    """Raises UserError when a file cannot be read any more."""
    heads = []
    for path in info.paths:
        end = min((tensor.offset for tensor in info.tensors if tensor.path == path), default=path.stat().st_size)
        try:
            with open(path, "rb") as file:
                heads.append(file.read(end))
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}") from None
    info.check_unchanged()
    return Skeleton(info.path, tuple(path.name for path in info.paths), tuple(heads), info.states, info.fingerprint)


def put_up(skeleton: Skeleton, folder: Path) -> ModelInfo:
    """The model as its host sees it, of files in `folder` that have the same headers and sizes, and no weights.

    Raises UserError when they cannot be written.
    """
    try:
        for name, head, state in zip(skeleton.names, skeleton.heads, skeleton.states, strict=True):
            with open(folder / name, "wb") as file:
                file.write(head)
                file.truncate(state.n_bytes)
    except OSError as error:
        raise UserError(f"no room in {folder} for the headers of {skeleton.path}: {error.strerror}") from None
    info = read_model_info(folder / skeleton.names[0])
    return replace(info, path=skeleton.path, states=skeleton.states, fingerprint=skeleton.fingerprint)
