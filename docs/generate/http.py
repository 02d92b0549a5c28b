"""The fields of a request that follow from the code, for the reference page http.md."""

from __future__ import annotations

import json
import math

from docs.generate.markdown import table
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.core.settings import settings_of
from pipeinfer.job.requests.field_names import ALIASES, IN_EFFECT, ONLY, WITHOUT_EFFECT


def tables() -> str:
    only = [[f"`{name}`", " or ".join(f"`{json.dumps(value)}`" for value in values)] for name, values in ONLY.items()]
    ignored = ", ".join(f"`{name}`" for name in WITHOUT_EFFECT)
    return "\n".join([
        "### Sampling\n",
        table(["field", "default", "from", "to", "option"], _sampling()),
        "### With these values alone\n",
        "Other values would change the text, and are refused.",
        "The server also takes other values of `n`, `best_of` and `stream`; a batch does not.\n",
        table(["field", "values"], only),
        "### Accepted without effect\n",
        "Other values of these are passed over:\n",
        table(["field", "values"], [[f"`{name}`", " or ".join(f"`{json.dumps(value)}`" for value in values)]
                                    for name, values in IN_EFFECT.items()]),
        f"{ignored}. The server reads `cache_prompt` and `stream_options`.\n",
    ])  # fmt: skip


def _sampling() -> list[list[str]]:
    rows = []
    for name, default, setting in settings_of(SamplingParams):
        names = [*(alias for alias, meant in ALIASES.items() if meant == name), name]
        most = "" if setting.most == math.inf else f"{setting.most:.10g}"
        shown = ", ".join(f"`{each}`" for each in names)
        rows.append([shown, f"{default:g}", f"{setting.least:g}", most, f"`{setting.flag}`"])
    return rows
