"""Which llama.cpp is installed: asked of its libraries, without importing llama_cpp, which takes half a second."""

import ctypes
import importlib.util
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

SUFFIX = "dylib" if sys.platform == "darwin" else "so"


def describe_build() -> str:
    """llama.cpp's version, ggml's and the package's; what cannot be told is left out."""
    try:
        package = f"llama-cpp-python {version('llama-cpp-python')}"
    except PackageNotFoundError:
        return "llama-cpp-python is not installed"
    versions = [("llama.cpp", _ask("llama", "llama_version")), ("ggml", _ask("ggml-base", "ggml_version"))]
    return ", ".join([*(f"{name} {found}" for name, found in versions if found), package])


def _ask(library: str, function: str) -> str:
    """What a function without arguments answers; empty where there is no such library or function."""
    spec = importlib.util.find_spec("llama_cpp")
    folder = Path((spec and spec.origin) or "").parent / "lib"
    try:
        call = getattr(ctypes.CDLL(str(folder / f"lib{library}.{SUFFIX}")), function)
    except (OSError, AttributeError):
        return ""
    call.restype = ctypes.c_char_p
    answer: bytes | None = call()
    return (answer or b"").decode("utf-8", "replace")
