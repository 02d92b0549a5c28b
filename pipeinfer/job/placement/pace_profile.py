"""The profile to whose times a paced job is slowed down. Knows no model."""

from collections.abc import Sequence

from pipeinfer.cluster.timing.costs import Profile
from pipeinfer.errors import UserError
from pipeinfer.virtual.profile import load_profile


def pace_profile(spec: str, n_ranks: int, n_drafts: int, draft_split: Sequence[int] = ()) -> Profile:
    """The profile that `--pace NAME` or `--pace NAME:PAIR` gives `n_ranks` ranks. Raises UserError when none fits."""
    if max(draft_split, default=1) > 1:
        shown = ",".join(map(str, draft_split))
        raise UserError(f"--pace {spec}: a profile has each draft on 1 rank, --draft-split is {shown}; leave that out")
    name, _, pair = spec.partition(":")
    profile = load_profile(name).lay_out(n_ranks, pair, n_drafts > 0)
    if len(profile.drafts) != n_drafts:
        raise UserError(f"--pace {spec} has {len(profile.drafts)} drafts, here are {n_drafts}; give -md as often")
    return profile
