"""Recipes beside the package: they ask for what setup.cfg asks for, and start commands that exist. Builds nothing."""

from __future__ import annotations

import re
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import pytest

from pipeinfer import __version__
from pipeinfer.cli.commands import COMMANDS, cli

yaml = pytest.importorskip("yaml", reason="the extra `hub` is not installed")

ROOT = Path(__file__).parent.parent
PACKAGING = ROOT / "packaging"


def test_the_conda_recipe_has_the_requirements_of_setup_cfg() -> None:
    recipe = yaml.safe_load((PACKAGING / "conda" / "recipe.yaml").read_text())
    assert recipe["context"]["version"] == __version__
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras = setup["options.extras_require"]
    asked = f"{setup['options']['install_requires']}\n{extras['serve']}\n{extras['hub']}".split("\n")
    there = [each["then"] if isinstance(each, dict) else each for each in recipe["requirements"]["run"]]
    assert there[0] == f"python {setup['options']['python_requires']}"
    assert set(there[1:]) == {conda_spec(each) for each in asked if each.strip()}


def conda_spec(requirement: str) -> str:
    name, limits = re.fullmatch(r"([\w-]+)([^;]*)(?:;.*)?", requirement.strip()).groups()  # type: ignore[union-attr]
    return f"{'prometheus_client' if name == 'prometheus-client' else name} {limits.strip()}".strip()


def test_the_mpi_job_starts_a_server_that_its_service_finds() -> None:
    job, service = yaml.safe_load_all((PACKAGING / "kubernetes" / "serve.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    launcher, worker = (container(job["spec"], role) for role in ("Launcher", "Worker"))
    mpirun, _, n_ranks, program, command, *words = launcher["command"]
    assert (mpirun, Path(program).name) == ("mpirun", "pipeinfer") and command in COMMANDS
    assert int(n_ranks) == job["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"] * job["spec"]["slotsPerWorker"]
    found = cli.get_command(None, command)  # type: ignore[arg-type]
    assert found
    context = found.make_context(command, [], resilient_parsing=True)
    parsed, rest, _ = found.make_parser(context).parse_args(words)
    assert not rest and parsed["port"] == str(worker["ports"][0]["containerPort"])
    assert service["spec"]["ports"][0]["targetPort"] == worker["ports"][0]["name"]
    assert service["spec"]["selector"]["training.kubeflow.org/job-name"] == job["metadata"]["name"]
    mounts = {mount["mountPath"]: mount["name"] for mount in worker["volumeMounts"]}
    volumes = {volume["name"] for volume in job["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"]["volumes"]}
    assert set(mounts.values()) == volumes and str(Path(parsed["model"]).parent) in mounts


def container(spec: dict[str, Any], role: str) -> dict[str, Any]:
    (found,) = spec["mpiReplicaSpecs"][role]["template"]["spec"]["containers"]
    return dict(found)
