"""Which experiment a row of results.csv is of: settings, ablations and models in its words. Knows no job."""

import hashlib
from collections.abc import Sequence
from typing import Any

from pipeinfer.core.policy import Policy
from pipeinfer.core.settings import settings_of, value_text
from pipeinfer.observe.table import Record

HASH_DIGITS = 16


def digest(value: object) -> str:
    """Digits that two different values do not share, of what `repr` shows in full."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:HASH_DIGITS]


def settings_text(policy: Policy, couple: bool = True, drafting: Sequence[str] = ()) -> str:
    """The policy's main settings, and those that are not defaults of its preset: `draft 4, width 3`. `drafting`: how
    guesses are made."""
    if not policy.drafts:
        return ""
    own = policy.preset_values()
    shown = [
        f"{name.removeprefix('n_')} {value_text(value)}"
        for name, default, setting in settings_of(type(policy))
        if (value := getattr(policy, name)) != own.get(name, default) or setting.shown
        if default is not True
    ]
    return ", ".join([*shown, *drafting, *([] if couple else ["no-couple-draft"])])


def variant_text(policy: Policy, cancel: bool, partitions: bool) -> str:
    """What an ablation study switched off, by the flags that did it; empty for the whole policy of its preset."""
    own = policy.preset_values()
    off = [
        setting.flag[2:]
        for name, _, setting in settings_of(type(policy))
        if getattr(policy, name) is False and own.get(name) is not False
    ]
    return ", ".join([*["no-cancel"] * (not cancel), *off, *["no-partitions"] * (not partitions)])


def model_columns(model: dict[str, Any], draft: dict[str, Any] | None) -> Record:
    """The columns about a target and its drafts."""
    columns = {"": "name", "_bytes": "bytes", "_hash": "hash"}
    found = {f"model{suffix}": model[name] for suffix, name in columns.items()}
    found |= {f"model_draft{suffix}": draft[name] if draft else "" for suffix, name in columns.items()}
    quantisation_draft = draft["quantisation"] if draft else ""
    return found | {"quantisation": model["quantisation"], "quantisation_draft": quantisation_draft}
