"""The process in which a chat template is rendered: a sandbox with little time and memory. Knows no model.

A template comes with a model file, from anywhere: it may loop for ever, or try to leave the sandbox. One JSON object is
read from standard input, with any number of `contexts`; an object is written to standard output: `answers` has of each
its `text`, or `error` with what is wrong; else it has `broken`: what is wrong with the template whatever it is given.
"""

from __future__ import annotations

import contextlib
import json
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from jinja2 import Template

T = TypeVar("T")


def main(cpu_s: int, n_bytes: int, n_characters: int) -> None:
    """`n_characters`: of a rendered text at most."""
    import jinja2.sandbox  # noqa: F401 (while nobody waits: it may have been started ahead)

    asked = json.load(sys.stdin)
    limit(cpu_s, n_bytes)

    def attempt(name: str, work: Callable[[], T]) -> T | dict[str, str]:
        """What comes of it; else, by this name, what is wrong."""
        try:
            return work()
        except MemoryError:
            return {name: f"takes more than {n_bytes >> 20} MiB of memory"}
        except RecursionError:
            return {name: "calls itself without end"}
        except Exception as error:  # whatever a template can raise
            return {name: f"{type(error).__name__}: {error}"}

    def answer(template: Template, context: Mapping[str, Any]) -> dict[str, str]:
        text = attempt("error", lambda: template.render(**context))
        if isinstance(text, dict) or len(text) <= n_characters:
            return text if isinstance(text, dict) else {"text": text}
        return {"error": f"renders {len(text)} characters"}

    template = attempt("broken", lambda: parse(asked["source"], asked["now_s"]))
    if isinstance(template, dict):
        json.dump(template, sys.stdout)
    else:
        json.dump({"answers": [answer(template, context) for context in asked["contexts"]]}, sys.stdout)


def limit(cpu_s: int, n_bytes: int) -> None:
    """What of it the system knows; who started the process has a clock besides."""
    limits = ((resource.RLIMIT_CPU, cpu_s), (resource.RLIMIT_AS, n_bytes), (resource.RLIMIT_CORE, 0))
    for name, most in limits:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(name, (most, most))


def parse(source: str, now_s: float) -> Template:
    """The template, with the functions and tags that templates of chats expect. Raises whatever jinja2 does."""
    from jinja2 import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.nodes import Node
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}…{% endgeneration %}` marks, for training, what the assistant says. Here it is just said."""

        tags = {"generation"}  # noqa: RUF012 (jinja2's)

        def parse(self, parser: Parser) -> list[Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> str:
        raise TemplateError(message)

    def as_json(
        value: object, indent: int | None = None, ensure_ascii: bool = False,
        separators: Sequence[str] | None = None, sort_keys: bool = False,
    ) -> str:  # fmt: skip
        pair = (str(separators[0]), str(separators[1])) if separators else None
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=pair, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = as_json  # jinja2's own is for HTML
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: time.strftime(form, time.localtime(now_s))
    return environment.from_string(source)
