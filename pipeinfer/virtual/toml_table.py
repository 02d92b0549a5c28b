"""Values of a table in TOML, each checked, and refused with the place where it stands. Knows no cluster and no file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeinfer.errors import UserError

LEAST, MOST = 1e-9, 1e12
"""Far beyond any machine in any of the units, and near enough to 1 that no sum or product of them overflows."""

MAX_SHOWN = 80


@dataclass(frozen=True, slots=True)
class Table:
    """A TOML table that knows where it is, so that errors can say so."""

    where: str
    values: Mapping[str, Any]

    def number(self, key: str, default: float | None = None) -> float:
        """0, or a number from LEAST to MOST. Raises UserError."""
        value = self.values.get(key, default)
        if value is None:
            raise UserError(f"{self.where} lacks {key}; give a number")
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not (value == 0 or LEAST <= value <= MOST):
            raise UserError(f"{self.where}: {key} = {_shown(value)}; give 0, or a number from {LEAST:g} to {MOST:g}")
        return float(value)

    def positive(self, key: str) -> float:
        value = self.number(key)
        if value == 0:
            raise UserError(f"{self.where}: {key} = 0; give a number above 0")
        return value

    def count(self, key: str, default: int | None = None, most: int = 10_000) -> int:
        value = self.number(key, default)
        if value != int(value) or not 1 <= value <= most:
            raise UserError(f"{self.where}: {key} = {value:g}; give a whole number from 1 to {most}")
        return int(value)

    def flag(self, key: str) -> bool:
        """False if it is not there. Raises UserError."""
        value = self.values.get(key, False)
        if not isinstance(value, bool):
            raise UserError(f"{self.where}: {key} = {_shown(value)}; give true or false")
        return value

    def text(self, key: str, among: Sequence[str]) -> str:
        value = self.values.get(key)
        if value not in among:
            raise UserError(f"{self.where}: {key} = {_shown(value)}; there are {', '.join(among) or 'none'}")
        return str(value)

    def texts(self, one: str, several: str, among: Sequence[str]) -> list[str]:
        """One value under the key `one`, or a list of them under `several`."""
        values = self.values.get(several)
        if values is None:
            return [self.text(one, among)]
        if not isinstance(values, list) or not values:
            raise UserError(f"{self.where}: {several} = {_shown(values)}; give a list of names")
        return [Table(f"{self.where}, {several}", {several: value}).text(several, among) for value in values]

    def numbers(self, key: str, n: int | None = None) -> tuple[float, ...]:
        """A list of numbers, `n` if that is given; a lone number is a list of one."""
        values = self.values.get(key)
        if n == 1 and not isinstance(values, list):
            return (self.number(key),)
        if not isinstance(values, list) or not values or (n is not None and len(values) != n):
            wanted = "numbers" if n is None else f"{n} numbers"
            raise UserError(f"{self.where}: {key} = {_shown(values)}; give a list of {wanted}")
        return tuple(Table(f"{self.where}, {key}", {key: value}).number(key) for value in values)

    def table(self, key: str, default: Mapping[str, Any] | None = None) -> "Table":
        value = self.values.get(key, default)
        if not isinstance(value, Mapping):
            raise UserError(f"{self.where} lacks the table [{key}]")
        return Table(f"{self.where}, [{key}]", value)

    def tables(self, key: str) -> "dict[str, Table]":
        return {name: self.table(key).table(name) for name in self.table(key, {}).values}

    def list_of(self, key: str) -> "list[Table]":
        value = self.values.get(key)
        if not isinstance(value, list) or not value or not all(isinstance(item, Mapping) for item in value):
            raise UserError(f"{self.where} lacks [[{key}]]")
        return [Table(f"{self.where}, [[{key}]] {index}", item) for index, item in enumerate(value, start=1)]


def _shown(value: object) -> str:
    text = repr(value) if not isinstance(value, int) or abs(value) < MOST else f"{'-' * (value < 0)}{MOST:g} and more"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"
