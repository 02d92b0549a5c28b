"""The shipped demonstration pair, the default of every command. See MODEL_CARD.md beside this file."""

from pathlib import Path

TARGET = Path(__file__).with_name("target.gguf")
DRAFT = Path(__file__).with_name("draft.gguf")
