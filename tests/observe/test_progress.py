"""What is said about a long prompt, and that nothing is said about a short one."""

from __future__ import annotations

import io

from rich.console import Console

from pipeinfer.observe.progress import PromptProgress


class Progressing:
    """A prompt of 1 000 rows, 10 of which take `row_s`."""

    def __init__(self, row_s: float, terminal: bool = False) -> None:
        self.now, self.out = 0.0, io.StringIO()
        console = Console(file=self.out, force_terminal=terminal, width=80, highlight=False)
        self.progress = PromptProgress(console, lambda: self.now, 1000)
        for n_done in range(10, 1001, 10):
            self.now += row_s
            self.progress.update(n_done)
        self.progress.close()


def test_a_short_prompt_is_not_spoken_of() -> None:
    assert Progressing(0.0099).out.getvalue() == ""
    assert Progressing(0.0099, terminal=True).out.getvalue() == ""


def test_a_long_one_gets_a_few_lines() -> None:
    lines = Progressing(0.3).out.getvalue().splitlines()
    assert lines[0] == "prompt: 40 of 1000 tokens after 1.2 s"
    assert len(lines) == 5 and lines[-1].startswith("prompt: 540 of 1000 tokens after 16")


def test_a_terminal_gets_a_bar() -> None:
    text = Progressing(0.3, terminal=True).out.getvalue()
    assert "prompt" in text and "/1000" in text
