"""Options of how a model is talked to: its template, the system's message, what ends an answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from pipeinfer.cli.command import is_from_environment
from pipeinfer.cli.values import File, Text
from pipeinfer.job.options.options import ChatOptions, unescape
from pipeinfer.models.text.stop_strings import check_stops

Command = TypeVar("Command", bound=Callable[..., Any])


TEMPLATE_NAMES = ("system", "system_file", "template_file", "variables")
CHAT_NAMES = (*TEMPLATE_NAMES, "stops")


def chat_options(command: Command) -> Command:
    """Add them; `take_chat` and `take_stops` collect what they gave."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command


OPTIONS = (
    click.option("-sys", "--system-prompt", "system", type=Text(), help="In a chat, what the system says first."),
    click.option(
        "-sysf", "--system-prompt-file", "system_file", type=File(), help="The same, from a file.",
    ),
    click.option(
        "--chat-template-file", "template_file", type=File(),
        help="The chat template, in Jinja. [default: the model's own]",
    ),
    click.option(
        "--chat-template-kwargs", "variables", type=Text(),
        help='What else the template may look at, as a JSON object: {"enable_thinking": false}.',
    ),
    click.option(
        "-r", "--reverse-prompt", "--stop", "stops", type=Text(blank=True), multiple=True,
        help="End the text where this stands in it, which is not printed; may be given several times.",
    ),
)  # fmt: skip


def take_chat(given: dict[str, Any], is_chat: bool, escape: bool) -> ChatOptions | None:
    """Move the options' values out of a command's keyword arguments; None where there is no chat.

    Raises click.UsageError for options that only a chat has, and for two system messages.
    """
    found = {name: given.pop(name) for name in TEMPLATE_NAMES}
    if not is_chat:
        ctx = click.get_current_context(silent=True)
        for name, value in found.items():
            if value is not None and not (ctx and is_from_environment(ctx, name)):
                flag = next(param for param in _params() if param.name == name).opts[-1]
                raise click.UsageError(f"{flag} is for chats; give --chat or -cnv too, or leave it out")
        return None
    if found["system"] is not None and found["system_file"] is not None:
        raise click.UsageError("-sys and -sysf both give the system's message; give one of them")
    if found["system"] is not None and escape:
        found["system"] = unescape(found["system"], "--system-prompt")
    return ChatOptions(**found)


def take_stops(given: dict[str, Any], escape: bool) -> tuple[str, ...]:
    """The same for the stop strings. Raises UserError for what cannot be one."""
    stops = tuple(unescape(text, "--stop") if escape else text for text in given.pop("stops"))
    check_stops("--stop", stops)
    return stops


def _params() -> list[click.Parameter]:
    command = chat_options(click.command()(lambda: None))
    return command.params
