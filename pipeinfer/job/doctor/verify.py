"""`pipeinfer models verify`: hashes of whole files on all hosts, and whether they are the same."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pipeinfer.errors import UserError
from pipeinfer.job.doctor.findings import NO_JOB, Cluster, errors
from pipeinfer.job.doctor.hashes import MANIFEST, read_manifest
from pipeinfer.job.doctor.host_checks import name, python, ssh
from pipeinfer.job.doctor.host_list import read_host_list
from pipeinfer.job.doctor.inquiry import host_sessions, read_hashes
from pipeinfer.models.gguf.model_info import part_paths


def verify_files(files: Sequence[Path], hosts: str | None) -> dict[str, Any]:
    """Of every host and file, all parts of a split one, the SHA-256, compared with the manifest beside the file here.
    Raises UserError for a host without an answer."""
    host_list = read_host_list(hosts, None)
    paths = [Path(os.path.abspath(part)) for file in files for part in part_paths(file)]
    with host_sessions(host_list) as reports:
        for report in reports.values():
            for problem in errors((name, ssh, python), report, Cluster(host_list, NO_JOB, reports)):
                raise UserError(f"{report.name}: {problem.text} -> {problem.fix}")
        read_hashes(reports.values(), paths)
    for report in reports.values():
        if report.hashes_failure or any(str(path) not in report.hashes for path in paths):
            why = report.hashes_failure or "the program there ended"
            raise UserError(f"{report.name}: no hashes come from there: {why}; see pipeinfer doctor")
    result = [
        {"host": name, "path": str(path)} | report.hashes[str(path)]
        for path in paths
        for name, report in reports.items()
    ]
    for each in result:
        listed = read_manifest((path := Path(each["path"])).parent).get(path.name)
        if listed and not each["error"] and each["sha256"] != listed:
            each["error"] = f"{each['sha256']}, and {MANIFEST} beside it has {listed}"
    alike = all(len({each["sha256"] for each in result if each["path"] == str(path)}) == 1 for path in paths)
    return {"files": result, "alike": alike and not any(each["error"] for each in result)}


def verify_lines(result: dict[str, Any]) -> Iterator[str]:
    for each in result["files"]:
        yield f"{each['host']}: {each['path']}: {each['error'] or each['sha256']}"
    if not result["alike"] and any(each["sha256"] for each in result["files"]):
        yield "they differ: copy the file again from the host whose hash is that of the model's source"
