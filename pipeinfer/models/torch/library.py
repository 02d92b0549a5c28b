"""Is torch there, and how is it made ready? Imports it only when asked to. Knows no model."""

import os
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from pipeinfer.errors import UserError
from pipeinfer.models.llama.threads import spin_briefly

MISSING = "--backend torch needs PyTorch, which is not installed here; pip install 'pipeinfer[torch]' on every host"


def torch_version() -> str:
    """Of the package that is installed, without importing it; empty where there is none."""
    if find_spec("torch") is None:
        return ""
    try:
        return version("torch")
    except PackageNotFoundError:
        return "unknown"


@cache
def load_torch() -> Any:
    """The module, its waiting threads told to spin briefly only. Raises UserError where there is none."""
    spin_briefly(os.environ)
    try:
        import torch
    except ImportError:
        raise UserError(MISSING) from None
    return torch
