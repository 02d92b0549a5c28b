"""Energy meters of a host, as files."""

import math
from pathlib import Path

import pytest

from pipeinfer.cluster.hosts.resources import EnergyMeter


def zone(folder: Path, name: str, microjoules: str, label: str = "package-0") -> None:
    (folder / name).mkdir(exist_ok=True)
    (folder / name / "name").write_text(label)
    (folder / name / "energy_uj").write_text(microjoules)
    (folder / name / "max_energy_range_uj").write_text("1000000000")


def test_packages_and_memory_are_added_up(tmp_path: Path) -> None:
    zone(tmp_path, "intel-rapl:0", "999000000")
    zone(tmp_path, "intel-rapl:0:0", "5000000", "core")
    zone(tmp_path, "intel-rapl:0:1", "1000000", "dram")
    meter = EnergyMeter(tmp_path)
    zone(tmp_path, "intel-rapl:0", "4000000")  # it has begun anew
    zone(tmp_path, "intel-rapl:0:0", "9000000", "core")
    zone(tmp_path, "intel-rapl:0:1", "3000000", "dram")
    assert meter.take_joules() == pytest.approx(5 + 2)
    assert meter.take_joules() == 0


def test_without_a_readable_meter_there_is_no_number(tmp_path: Path) -> None:
    assert math.isnan(EnergyMeter(tmp_path).take_joules())
    zone(tmp_path, "intel-rapl:0", "none")
    assert math.isnan(EnergyMeter(tmp_path).take_joules())
