"""Child processes: they import what their parent can import, and nothing from the current directory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeinfer.child import ROOT, python_command
from pipeinfer.job.inspect import info

PARENT = """
import subprocess, sys
from pipeinfer.child import python_command
sys.exit(subprocess.run(python_command("import only_here, pipeinfer.errors; sys.exit(int(sys.argv[1]))", 7)).returncode)
"""


@pytest.mark.parametrize("safe", ["", "1"])
def test_a_child_imports_what_its_parent_can(tmp_path: Path, safe: str) -> None:
    """The first entry of PYTHONPATH included: with PYTHONSAFEPATH it is the first of `sys.path`."""
    (tmp_path / "only_here.py").touch()
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), ROOT]), "PYTHONSAFEPATH": safe}
    assert subprocess.run([sys.executable, "-c", PARENT], env=environ).returncode == 7


def test_the_current_directory_replaces_no_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    assert subprocess.run(python_command("import json")).returncode == 0
    assert info.describe_mpi()["error"] is None
