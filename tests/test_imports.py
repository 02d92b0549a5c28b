"""Who may import whom: rooms on floors, each of which knows only those below."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "pipeinfer"
MODULES = sorted(PACKAGE.rglob("*.py"))


FLOORS = (
    ("ground",),
    ("core",),
    ("policies", "models"),
    ("observe",),
    ("cluster",),
    ("virtual",),
    ("job",),
    ("server",),
    ("supervisor",),
    ("cli",),
)
"""From the bottom: a room imports from the rooms of lower floors, and from itself."""

JOB_FLOORS = (
    ("process",),
    ("options", "submit"),
    ("doctor",),
    ("placement",),
    ("launch",),
    ("requests",),
    ("loading",),
    ("profiling",),
    ("planning",),
    ("session",),
    ("run", "chat", "batch", "serve", "bench", "perplexity", "inspect"),
)
"""The same of the rooms within `job`, folders and files."""

APART = {("cluster", "models"), ("virtual", "models")}
"""What never meets although a floor lies between: `job` composes them."""


def room_of(module: str) -> str:
    """The room of `pipeinfer.room.file`; the few files that lie beside the rooms are what all stand on."""
    parts = module.split(".")
    return parts[1] if (PACKAGE / parts[1]).is_dir() else "ground"


def job_room_of(module: str) -> str:
    """The room within `job`; empty for what is elsewhere."""
    parts = module.split(".")
    return parts[2] if parts[1] == "job" and len(parts) > 2 and parts[2] != "__init__" else ""


def module_of(path: Path) -> str:
    return ".".join(("pipeinfer", *path.relative_to(PACKAGE).with_suffix("").parts))


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_every_room_has_a_floor() -> None:
    rooms = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert rooms == {room for floor in FLOORS for room in floor} - {"ground"}


def test_rooms_import_only_from_rooms_below() -> None:
    floor_of = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
    for path in MODULES:
        if path.name == "__main__.py":  # stands for the console script
            continue
        ours = room_of(module_of(path))
        for name in imported(path):
            if not name.startswith("pipeinfer.") or name == "pipeinfer.__version__":
                continue
            theirs = room_of(name)
            below = theirs == ours or floor_of[theirs] < floor_of[ours]
            assert below and (ours, theirs) not in APART, f"{path} imports {name}: {ours} may not know {theirs}"


def test_rooms_of_a_job_import_only_from_rooms_below() -> None:
    floor_of = {room: floor for floor, rooms in enumerate(JOB_FLOORS) for room in rooms}
    rooms = {job_room_of(module_of(path)) for path in MODULES} - {""}
    assert rooms == floor_of.keys()
    for path in MODULES:
        if ours := job_room_of(module_of(path)):
            for theirs in filter(
                None, map(job_room_of, filter(lambda name: name.startswith("pipeinfer."), imported(path)))
            ):
                assert theirs == ours or floor_of[theirs] < floor_of[ours], f"{path}: {ours} may not know {theirs}"


def test_files_of_a_room_import_each_other_in_one_direction() -> None:
    """Also where an import is in a function, or for the type checker alone."""
    known = {module_of(path): path for path in MODULES if not path.name.startswith("__")}
    graph = {name: {each for each in imported(path) if each in known and each != name} for name, path in known.items()}
    left = {name: {each for each in theirs if room_of(each) == room_of(name)} for name, theirs in graph.items()}
    while free := [name for name, theirs in left.items() if not theirs & left.keys()]:
        for name in free:
            del left[name]
    cycles = {name: sorted(theirs & left.keys()) for name, theirs in left.items()}
    assert not cycles, cycles


def test_no_file_is_long() -> None:
    lengths = {str(path): len(path.read_text().splitlines()) for path in MODULES}
    assert [path for path, length in lengths.items() if length > 350] == []


def test_core_and_policies_need_numpy_only() -> None:
    for path in MODULES:
        if room_of(module_of(path)) in ("core", "policies") and path.name != "__main__.py":
            foreign = {name.split(".")[0] for name in imported(path)} - sys.stdlib_module_names - {"pipeinfer", "numpy"}
            assert not foreign, f"{path} imports {foreign}"


def test_one_file_imports_mpi() -> None:
    assert [path.name for path in MODULES if any(name.startswith("mpi4py") for name in imported(path))] == [
        "transport.py"
    ]


def test_importing_the_package_and_its_command_does_not_start_mpi() -> None:
    code = "import sys, pipeinfer.cli.commands; sys.exit('mpi4py' in sys.modules or 'llama_cpp' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_process_that_speaks_http_knows_no_mpi() -> None:
    pytest.importorskip("starlette", reason="the extra `serve` is not installed")
    code = "import sys, pipeinfer.server.process; sys.exit('mpi4py' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_rank_imports_only_what_it_needs() -> None:
    """Every rank of a job pays for its imports."""
    code = """
import sys
import pipeinfer.cli, pipeinfer.cli.run, pipeinfer.cli.serve, pipeinfer.server.front
import pipeinfer.job.launch, pipeinfer.job.loading.load
from pipeinfer.models.llama.ggml import load_library
load_library()
heavy = {"rich", "matplotlib", "jinja2", "gguf", "torch", "llama_cpp.llama"}
heavy |= {"pipeinfer.cli.bench", "pipeinfer.job.run", "starlette", "uvicorn", "pydantic"}
sys.exit(", ".join(heavy & sys.modules.keys()) or 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_llama_cpp_can_still_be_imported_whole() -> None:
    code = """
from pipeinfer.models.llama.ggml import load_library
library = load_library()
import llama_cpp
assert llama_cpp.Llama and llama_cpp.llama_cpp is library
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
