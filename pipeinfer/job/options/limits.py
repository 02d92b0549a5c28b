"""Limits of options, and the words and numbers that stand for a special value. Knows no option."""

from pathlib import Path

INT32_MAX = 2**31 - 1
"""What libllama and the messages between ranks hold: tokens, positions, counts."""

MAX_SEQUENCES = 254
"""Branches and requests at a time: libllama has room for two more, which the stages keep for themselves."""

MAX_CTX = INT32_MAX - 1023
"""Tokens of a context: with the cells above it, positions and cells must be 32-bit numbers."""

MAX_THREADS = 512  # libggml's limit
MAX_LAYERS = 512  # libllama's limit
MAX_SAMPLERS = 64
MAX_GBIT = 10**6
MAX_TOKENS = 1 << 19  # prompt and text together: what synthetic choices hold

ALL_LAYERS, AUTO_LAYERS = -1, -2
"""All of a rank's layers on its GPU; the same where there is a GPU, else none."""

NO_DEVICE = ("none",)
"""Of a rank's devices: its layers stay on the CPU."""

AUTO, ON, OFF = "auto", "on", "off"

STDIN = Path("-")
NO_DRAFT = Path("none")
