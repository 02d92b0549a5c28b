"""The energy that this host's processors and memory use, by RAPL. Knows no job."""

import math
from pathlib import Path

ZONES = Path("/sys/class/powercap")


class EnergyMeter:
    """The packages' counters, and those of memory where they have one. `zones`: the folder of them."""

    def __init__(self, zones: Path = ZONES) -> None:
        found = [zone for zone in sorted(zones.glob("intel-rapl:*")) if zone.name.count(":") == 1 or _is_memory(zone)]
        self._zones = {zone: _read(zone / "max_energy_range_uj") for zone in found}
        self._before = self._counts()

    def take_joules(self) -> float:
        """Since the last time; NaN where there is no counter, or one cannot be read."""
        before, self._before = self._before, self._counts()
        if not before:
            return math.nan
        ranges = self._zones.values()  # where a counter begins anew
        used = (now - then if now >= then else now - then + most
                for now, then, most in zip(self._before, before, ranges, strict=True))  # fmt: skip
        return 1e-6 * sum(used)

    def _counts(self) -> list[float]:
        return [_read(zone / "energy_uj") for zone in self._zones]


def _is_memory(zone: Path) -> bool:
    try:
        return (zone / "name").read_text().strip() == "dram"
    except OSError:
        return False


def _read(path: Path) -> float:
    try:
        return float(path.read_text())
    except (OSError, ValueError):
        return math.nan
