"""Checks of grammars and schemas leave the cores to whoever computes: on a busy host they take many times as long."""

from __future__ import annotations

from dataclasses import replace

import pytest


@pytest.fixture(autouse=True)
def patient_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    from pipeinfer.models.text import grammar, json_schema

    for module in (grammar, json_schema):
        limits = replace(module.PROCESS.limits, wall_s=240.0)
        monkeypatch.setattr(module, "PROCESS", replace(module.PROCESS, limits=limits))
