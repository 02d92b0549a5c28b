"""llama.cpp's `--spec-type`: what its kinds of guesses are called here. Loads no model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from pipeinfer.core.settings import setting
from pipeinfer.errors import UserError
from pipeinfer.job.options.limits import NO_DRAFT
from pipeinfer.job.options.values import Listed
from pipeinfer.policies import Iterative

NONE, MTP, MTP_DRAFT = "none", "draft-mtp", Path("mtp")
DRAFTS = ("draft-simple", "draft-eagle3")
N_GRAMS = ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")
MISSING = ("draft-dflash", "draft-dspark")
TYPES = (NONE, MTP, *DRAFTS, *N_GRAMS)


class SpecType(click.Choice[str]):
    """Of llama.cpp's names those that have a meaning here."""

    def __init__(self) -> None:
        super().__init__(TYPES)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value in MISSING:
            way_out = f"{', '.join((*DRAFTS, MTP))} and n-grams can"
            self.fail(f"{value!r} guesses with a model that cannot be loaded here; {way_out}", param, ctx)
        return super().convert(value, param, ctx)


@dataclass(frozen=True, kw_only=True)
class SpecTypes:
    """What guesses, by llama.cpp's names.

    spec_types: llama.cpp's names of what guesses, with commas between them: draft-simple and draft-eagle3 are the draft
        of -md, draft-mtp is -md mtp, those that begin with ngram are --lookup, none is no guesses at all.
    """

    heading = "Speculation"
    spec_types: tuple[str, ...] = setting((), "--spec-type", type=Listed(SpecType()))


def with_spec_types(values: dict[str, Any]) -> dict[str, Any]:
    """A command's values with the options that `--spec-type` stands for. Raises UserError where others contradict
    it."""
    values = dict(values)
    types = values.pop("spec_types", ())
    if not types:
        return values
    given = f"--spec-type {','.join(types)}"
    names_draft = {*values["drafts"], *values["hf_drafts"]} - {NO_DRAFT}
    has_grams, has_draft = any(each in N_GRAMS for each in types), any(each in (MTP, *DRAFTS) for each in types)
    if NONE in types:  # as in llama.cpp, whatever else is named
        has_grams = has_draft = False
    if names_draft and not has_draft:
        raise UserError(f"{given} has no draft, and -md names one; leave one of them out, or add draft-simple")
    if has_draft and not names_draft:
        if NO_DRAFT in values["drafts"] or MTP not in types:
            raise UserError(f"{given} guesses with a draft, and -md names none; give -md FILE, or leave that out")
        values["drafts"] = (MTP_DRAFT,)
    if not has_draft:
        values["drafts"] = (NO_DRAFT,)
    if has_grams or not has_draft:
        if values["lookup"] not in (None, has_grams):
            raise UserError(f"{given} and {'--lookup' if values['lookup'] else '--no-lookup'} contradict each other")
        if has_grams or values["policy"]:
            values["lookup"] = has_grams
        else:
            values["policy"] = Iterative.name
    return values
