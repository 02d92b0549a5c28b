"""Who may import whom: cli -> cluster, models, core; cluster -> core; models -> core; core -> numpy and the library."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "pipeinfer"
MODULES = sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first if first in ("cli", "cluster", "models") else "core"


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_rooms_import_only_what_they_may() -> None:
    allowed = {
        "cli": {"cli", "cluster", "models", "core"},
        "cluster": {"cluster", "core"},
        "models": {"models", "core"},
    }
    for path in MODULES:
        rooms = {
            name.split(".")[1] if name.split(".")[1] in ("cli", "cluster", "models") else "core"
            for name in imported(path)
            if name.startswith("pipeinfer.")
        }
        wrong = rooms - allowed.get(room_of(path), {"core"})
        if path.name != "__main__.py":  # stands for the console script
            assert not wrong, f"{path} imports from {wrong}"


def test_core_needs_numpy_only() -> None:
    for path in MODULES:
        if room_of(path) == "core" and path.name != "__main__.py":
            foreign = {name.split(".")[0] for name in imported(path)} - sys.stdlib_module_names - {"pipeinfer", "numpy"}
            assert not foreign, f"{path} imports {foreign}"


def test_one_file_imports_mpi() -> None:
    assert [path.name for path in MODULES if any(name.startswith("mpi4py") for name in imported(path))] == ["mpi.py"]


def test_importing_the_package_and_its_command_does_not_start_mpi() -> None:
    code = "import sys, pipeinfer.cli.commands; sys.exit('mpi4py' in sys.modules or 'llama_cpp' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_rank_imports_only_what_it_needs() -> None:
    """Every rank of a job pays for its imports."""
    code = """
import sys
import pipeinfer.cli.main, pipeinfer.cli.run, pipeinfer.cli.job, pipeinfer.cli.worker
from pipeinfer.models.ggml import load_library
load_library()
heavy = {"rich", "matplotlib", "jinja2", "gguf", "pipeinfer.cli.bench", "pipeinfer.cli.head", "llama_cpp.llama"}
sys.exit(", ".join(heavy & sys.modules.keys()) or 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_llama_cpp_can_still_be_imported_whole() -> None:
    code = """
from pipeinfer.models.ggml import load_library
library = load_library()
import llama_cpp
assert llama_cpp.Llama and llama_cpp.llama_cpp is library
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
