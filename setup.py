"""Build the evaluation callback in C where there is a compiler. All metadata is in setup.cfg."""

from hashlib import sha256
from pathlib import Path

from setuptools import Extension, setup

SOURCE = "pipeinfer/models/llama/eval_callback.c"
DIGEST = sha256(Path(SOURCE).read_bytes()).hexdigest()

setup(
    ext_modules=[
        Extension(
            "pipeinfer.models.llama._eval_callback", [SOURCE], define_macros=[("SOURCE", f'"{DIGEST}"')], optional=True
        )
    ]
)
