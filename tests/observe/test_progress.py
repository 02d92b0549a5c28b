"""What is said about a long prompt, and that nothing is said about a short one."""

from __future__ import annotations

import io

from rich.console import Console

from pipeinfer.observe.report import ProgressBar


class Progressing:
    """A prompt of 1 000 rows, 10 of which take `row_s`."""

    def __init__(self, row_s: float, terminal: bool = False) -> None:
        self.now, self.out = 0.0, io.StringIO()
        console = Console(file=self.out, force_terminal=terminal, width=80, highlight=False)
        self.progress = ProgressBar(console, lambda: self.now, "prompt", 1000, "tokens")
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


def test_long_waits_have_a_line_a_minute_with_the_rate_of_tokens() -> None:
    now, out = 0.0, io.StringIO()
    bar = ProgressBar(Console(file=out, width=80), lambda: now, "batch", 100, "requests", stays=True)
    for n_done in range(1, 101):
        now += 10
        bar.update(n_done, 40)
    lines = out.getvalue().splitlines()
    assert lines[0] == "batch: 1 of 100 requests after 10.0 s, 4.0 tokens/s"
    assert [line.split()[6] for line in lines[:6]] == ["10.0", "20.0", "40.0", "70.0", "130.0", "190.0"]


def test_bytes_are_told_in_megabytes() -> None:
    now, out = 0.0, io.StringIO()
    bar = ProgressBar(Console(file=out, width=80), lambda: now, "to rank 1", 10_000_000, "MB")
    now = 1.5
    bar.advance(4_000_000)
    bar.advance(6_000_000)
    bar.close()
    assert out.getvalue().splitlines() == ["to rank 1: 4 of 10 MB after 1.5 s"]
