"""The installed libllama and libggml: versions, devices, loaded quietly, with functions that llama_cpp does not export.
llama_cpp is imported by `load_library`, not by importing this module: it takes a while. Knows no model."""

import ctypes
import os
import re
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from pipeinfer.disk_cache import user_cache
from pipeinfer.errors import UserError
from pipeinfer.models.llama.params import NUMA_STRATEGIES
from pipeinfer.models.llama.threads import spin_briefly
from pipeinfer.text import printable

LOG_ERROR = 4
PROBE_TIMEOUT_S = 20.0
ABORTED = (
    "llama.cpp gave up: {line}; is the model's file whole (pipeinfer models verify FILE), and does this build "
    "({build}) know such models? Another quantisation may avoid the fault"
)
SUFFIX = "dylib" if sys.platform == "darwin" else "so"
OWN_LIBRARY = "LLAMA_CPP_LIB_PATH"  # a variable of llama-cpp-python: the folder of a libllama that the user compiled

_errors: deque[str] = deque(maxlen=4)
_callbacks: list[Any] = []  # held for libllama, which calls them until the process ends
_abort_reports: list[Callable[[str], object]] = []
_abort_causes: list[Callable[[str], str]] = []


@cache
def load_library() -> ModuleType:
    """llama_cpp's ctypes module, its backends initialised and its log silenced (see `last_errors`). Raises UserError
    when it is not installed, or its library cannot be loaded on this host."""
    spin_briefly(os.environ)
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")  # else a crash starts a debugger that prints a screenful
    try:
        library = _bindings()
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        why = " ".join(str(error).split())
        raise UserError(f"llama.cpp cannot be loaded ({why}); install a llama-cpp-python that fits this host") from None

    @library.llama_log_callback
    def on_log(level: int, text: bytes, _: object) -> None:
        if level == LOG_ERROR:
            _errors.append(text.decode("utf-8", "replace").strip())

    _callbacks.append(on_log)
    library.llama_log_set(on_log, None)
    _hear_aborts()
    library.llama_backend_init()
    return library


@cache
def load_extension() -> ModuleType:
    """libllama's functions for drafts that it computes. Raises UserError where a build has none."""
    load_library()
    try:
        return _bindings("llama_cpp_ext")
    except (ImportError, AttributeError) as error:
        raise UserError(f"this llama-cpp-python cannot compute EAGLE-3 heads ({error}); install 0.3.36") from None


def _bindings(name: str = "llama_cpp") -> ModuleType:
    """A ctypes module of llama_cpp without the package around it, whose import takes 0.2 s of each rank (measured). The
    module imports its siblings through the package, so an empty package is in `sys.modules` meanwhile; a later import
    of llama_cpp gets all of it."""
    spec = find_spec("llama_cpp")
    if "llama_cpp" in sys.modules or spec is None:
        return import_module(f"llama_cpp.{name}")
    sys.modules["llama_cpp"] = module_from_spec(spec)
    try:
        return import_module(f"llama_cpp.{name}")
    finally:
        del sys.modules["llama_cpp"]


def report_aborts(report: Callable[[str], object]) -> None:
    """From now on a failed assertion of libggml ends in `report(line)`, in its thread, which should not return."""
    _abort_reports[:] = [report]


def explain_aborts(explain: Callable[[str], str]) -> None:
    """From now on `explain(line)` is reported of a failed assertion, unless it is empty."""
    _abort_causes.append(explain)


def report_fault(line: str) -> NoReturn:
    """End this process as a failed assertion of libggml does."""
    _report(line)
    os._exit(1)


def _report(line: str) -> None:
    for report in _abort_reports or [lambda line: os.write(2, f"{line}\n".encode())]:
        report(line)


def _hear_aborts() -> None:
    @ctypes.CFUNCTYPE(None, ctypes.c_char_p)
    def on_abort(text: bytes) -> None:
        line = re.sub(r"^\S*/", "", " ".join(text.decode("utf-8", "replace").split()))  # without the build's folder
        cause = next(filter(None, (explain(line) for explain in _abort_causes)), "")
        _report(cause or ABORTED.format(line=line, build=describe_build()))

    with suppress(OSError, AttributeError):  # an older build has no such callback
        _libllama().ggml_set_abort_callback(on_abort)
        _callbacks.append(on_abort)


def hear_errors() -> None:
    """Take libllama's log again: importing the whole of llama_cpp gives it to that package."""
    load_library().llama_log_set(_callbacks[0], None)


def last_errors() -> str:
    """libllama's last complaints, on one line; forgotten afterwards."""
    text = "; ".join(_errors)
    _errors.clear()
    return printable(text)  # it quotes from damaged files


def use_nodes(strategy: str) -> None:
    """Set how libggml's threads use NUMA nodes, one of NUMA_STRATEGIES. Must come before the first of them."""
    load_library().llama_numa_init(1 + NUMA_STRATEGIES.index(strategy))


# -- libllama and libggml


def library_folder() -> Path:
    """The folder of libllama, as llama-cpp-python finds it: of the user's own build, or the package's."""
    if folder := os.environ.get(OWN_LIBRARY):
        return Path(folder)
    spec = find_spec("llama_cpp")
    return Path((spec and spec.origin) or "").parent / "lib"


def _libllama() -> ctypes.CDLL:
    """libllama, and through it libggml: pip installs copies of it under several names, of which one is in use."""
    return ctypes.CDLL(str(library_folder() / f"libllama.{SUFFIX}"))


def describe_build() -> str:
    """The versions of llama.cpp, ggml and the package, without importing llama_cpp; unknown ones are left out."""
    try:
        package = f"llama-cpp-python {version('llama-cpp-python')}"
    except PackageNotFoundError:
        return "llama-cpp-python is not installed"
    versions = (("llama.cpp", _version("llama_version")), ("ggml", _version("ggml_version")))
    folder = os.environ.get(OWN_LIBRARY)
    choice = [f"{OWN_LIBRARY} {folder}"] if folder else []
    return ", ".join([*(f"{name} {number}" for name, number in versions if number), package, *choice])


def _version(function: str) -> str:
    try:
        call = getattr(_libllama(), function)
    except (OSError, AttributeError):
        return ""
    call.restype = ctypes.c_char_p
    return (call() or b"").decode("utf-8", "replace")


@cache
def ggml() -> ctypes.CDLL:
    """The functions of libllama and libggml that llama_cpp does not export."""
    load_library()
    base = _libllama()
    for transfer in (base.ggml_backend_tensor_get, base.ggml_backend_tensor_set):
        transfer.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
        transfer.restype = None
    base.ggml_get_name.argtypes, base.ggml_get_name.restype = [ctypes.c_void_p], ctypes.c_void_p
    return base


@cache
def mapped_buffers() -> int:
    """libggml's type of buffers for weights in a CPU's memory that no kernel repacks."""
    base, alignment = ggml(), 64
    base.ggml_backend_cpu_buffer_from_ptr.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    base.ggml_backend_buffer_get_type.argtypes = base.ggml_backend_buffer_free.argtypes = [ctypes.c_void_p]
    base.ggml_backend_cpu_buffer_from_ptr.restype = base.ggml_backend_buffer_get_type.restype = ctypes.c_void_p
    memory = ctypes.create_string_buffer(2 * alignment)
    start = -ctypes.addressof(memory) % alignment + ctypes.addressof(memory)
    buffer = base.ggml_backend_cpu_buffer_from_ptr(start, alignment)
    buffer_type = int(base.ggml_backend_buffer_get_type(buffer))
    base.ggml_backend_buffer_free(buffer)
    return buffer_type


def type_name(ggml_type: int) -> str:
    """The name of a type of weights, such as q4_k."""
    name_of = ggml().ggml_type_name
    name_of.restype, name_of.argtypes = ctypes.c_char_p, [ctypes.c_int]
    return str(name_of(ggml_type).decode().lower())


def cache_key(subject: str) -> str:
    """The name under which properties of this libggml on this host are cached."""
    folder = library_folder()
    newest = max((file.stat().st_mtime_ns for file in folder.glob("lib*")), default=0)
    kernels = load_library().llama_print_system_info().decode()  # a host of this name may get another processor
    return f"{subject}: {folder} of {newest} on {os.uname().nodename}, {kernels}"


@cache
def amx_works() -> bool:
    """False when libggml has kernels for this processor's matrix tiles, and they crash or multiply wrongly. GCC 12
    drops most of the tile configuration before it is loaded (its `_tile_loadconfig` claims to read 8 of the 64 bytes),
    and the first multiplication then ends the process: another process tries."""
    if b"AMX_INT8 = 1" not in load_library().llama_print_system_info():
        return True
    name, store = cache_key("amx"), user_cache()
    works = store.get(name)
    if not isinstance(works, bool):
        works = probe_amx(library_folder())
        store.put(name, works)
    return works


def probe_amx(folder: Path) -> bool:
    """Whether the libggml in `folder` multiplies rightly, or has no AMX kernels for this processor."""
    probe = [sys.executable, "-I", "-S", str(Path(__file__).with_name("amx_probe.py")), str(folder)]
    try:
        done = subprocess.run(probe, capture_output=True, stdin=subprocess.DEVNULL, timeout=PROBE_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


KINDS = {0: "CPU", 1: "GPU", 2: "integrated GPU", 3: "accelerator"}  # ggml_backend_dev_type's answers
GPUS = ("GPU", "integrated GPU")  # kinds that layers can be put on


@dataclass(frozen=True, slots=True)
class Device:
    """`name`: ggml's, such as CUDA0; `description`: such as NVIDIA H100. Bytes are 0 if ggml does not know them."""

    name: str
    description: str
    kind: str
    free_bytes: int
    total_bytes: int


def has_gpu() -> bool:
    """Whether libllama sees a device that layers can be put on."""
    find = ggml().ggml_backend_dev_by_type
    find.restype, find.argtypes = ctypes.c_void_p, [ctypes.c_int]
    return any(find(number) for number, kind in KINDS.items() if kind in GPUS)


def llama_devices() -> list[Device]:
    """All that ggml knows, in its order."""
    return [device for device, _ in _devices()]


def device_list(names: Sequence[str]) -> ctypes.Array[ctypes.c_void_p]:
    """The devices of these names for libllama, with a null behind the last. Each must exist."""
    handles = {device.name: handle for device, handle in _devices()}
    return (ctypes.c_void_p * (len(names) + 1))(*(handles[name] for name in names), None)


def buffer_type(name: str) -> int:
    """ggml's type of buffers for weights on the device of this name, which must exist."""
    base, handles = ggml(), {device.name: handle for device, handle in _devices()}
    base.ggml_backend_dev_buffer_type.argtypes = [ctypes.c_void_p]
    base.ggml_backend_dev_buffer_type.restype = ctypes.c_void_p
    return int(base.ggml_backend_dev_buffer_type(handles[name]))


def _devices() -> Iterator[tuple[Device, int]]:
    """The devices with ggml's handles."""
    base = ggml()
    base.ggml_backend_dev_count.restype = ctypes.c_size_t
    base.ggml_backend_dev_get.argtypes, base.ggml_backend_dev_get.restype = [ctypes.c_size_t], ctypes.c_void_p
    base.ggml_backend_dev_type.argtypes, base.ggml_backend_dev_type.restype = [ctypes.c_void_p], ctypes.c_int
    size = ctypes.POINTER(ctypes.c_size_t)
    base.ggml_backend_dev_memory.argtypes, base.ggml_backend_dev_memory.restype = [ctypes.c_void_p, size, size], None
    for text in (base.ggml_backend_dev_name, base.ggml_backend_dev_description):
        text.argtypes, text.restype = [ctypes.c_void_p], ctypes.c_char_p
    for index in range(base.ggml_backend_dev_count()):
        device = base.ggml_backend_dev_get(index)
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        base.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
        kind = base.ggml_backend_dev_type(device)
        name, description = (
            ask(device).decode("utf-8", "replace").strip()
            for ask in (base.ggml_backend_dev_name, base.ggml_backend_dev_description)
        )
        yield Device(name, description, KINDS.get(kind, str(kind)), free.value, total.value), device
