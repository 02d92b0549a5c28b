"""Limits of options, and words and numbers with a special meaning. Knows no option."""

from pathlib import Path

INT32_MAX = 2**31 - 1  # the largest token, position or count of libllama and of messages between ranks
MAX_SEQUENCES = 254  # the most branches and requests at a time: libllama has room for two more, which the stages use

MAX_CTX = INT32_MAX - 1023  # tokens of a context: with the cells above it, positions are 32-bit numbers
MAX_THREADS = 512  # libggml's limit
MAX_LAYERS = 512  # libllama's limit
MAX_SAMPLERS = 64
MAX_GBIT = 10**6
MAX_TOKENS = 1 << 19  # prompt and text together: what synthetic choices hold
ALL_LAYERS, AUTO_LAYERS = -1, -2  # layers on a rank's GPU: all; all if there is a GPU, else none
NO_DEVICE = ("none",)  # the devices of a rank whose layers stay on the CPU
AUTO, ON, OFF = "auto", "on", "off"

STDIN = Path("-")
NO_DRAFT = Path("none")
