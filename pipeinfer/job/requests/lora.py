"""Adapters (LoRA) as requests and clients name them: by their numbers in the job, each with a factor."""

from collections.abc import Sequence
from typing import Any

from pipeinfer.core.types import AdapterScales
from pipeinfer.job.requests.fields import is_list_of, is_number, refuse, shown, whole
from pipeinfer.models.gguf.adapter import ScaledAdapter, active_scales, check_order

FIELD = "lora"
MAX_FACTOR = 10.0
"""Of a request, where the job has no larger one. With 1000 a small model's rows were no numbers, which ends a job."""


def read_scales(value: Any, adapters: Sequence[ScaledAdapter]) -> AdapterScales | None:
    """llama-server's list of objects with `id` and `scale`; adapters that it lacks are not applied. None: it says what
    the job says. Raises UserError."""
    if not is_list_of(dict, value):
        refuse(f'{FIELD} is {shown(value)}; give a list such as [{{"id": 0, "scale": 1.0}}]')
    if value and not adapters:
        refuse(none_loaded(value))
    scales = dict[int, float]()
    for each in value:
        number = whole(f"{FIELD}.id", each.get("id"), 0, len(adapters) - 1)
        scale = each.get("scale", 0)
        most = max(MAX_FACTOR, abs(adapters[number].scale))
        if not is_number(scale) or abs(scale) > most:
            refuse(f"{FIELD}.scale is {shown(scale)}; give a number from {-most:g} to {most:g}")
        scales[number] = float(scale)
    chosen = [ScaledAdapter(adapter, scales.get(number, 0.0)) for number, (adapter, _) in enumerate(adapters)]
    check_order(chosen, FIELD)
    active = active_scales(chosen)
    return None if active == active_scales(adapters) else active


def none_loaded(value: Any) -> str:
    return f"{FIELD} is {shown(value)}, and there is no adapter; start with --lora FILE"


def described(adapters: Sequence[ScaledAdapter], scales: AdapterScales | None) -> list[dict[str, Any]]:
    """All adapters as llama-server lists them. `scales`: see `read_scales`."""
    factors = dict(active_scales(adapters) if scales is None else scales)
    return [
        {"id": number, "path": str(adapter.path), "scale": factors.get(number, 0.0)}
        for number, (adapter, _) in enumerate(adapters)
    ]
