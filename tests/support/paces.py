"""Profiles for `--pace`: where a test asks who is first, that must not depend on what else is at work here."""

from __future__ import annotations

from pathlib import Path


def pace_words(folder: Path, profile: str) -> list[str]:
    """Options of a job that has this profile's times; its file is in the folder."""
    (path := folder / "pace.toml").write_text(profile)
    return ["--pace", str(path)]


def slow_target(layer_ms: float, draft_ms: float = 2.0, layers: int = 4, draft_layers: int = 2, stages: int = 2) -> str:
    """Stages that take long beside a draft, and links that take no time. `layers`: of each stage."""
    stage = f"[[stages]]\nlayers = {layers}\nrows = [1, 24]\nlayer_ms = [{layer_ms}, {layer_ms}]\n"
    draft = f"[draft]\nlayers = {draft_layers}\nrows = [1]\nlayer_ms = [{draft_ms}]\n"
    return f"embd = 288\n[link]\nlatency_us = 10\ngbit_per_s = 10\n{stage * stages}{draft}"


def with_refiner(profile: str, layer_ms: float, layers: int) -> str:
    """With a further draft, which refines the guesses of the first."""
    return f"{profile}[[refiners]]\nlayers = {layers}\nrows = [1, 24]\nlayer_ms = [{layer_ms}, {layer_ms}]\n"


def slow_runs(run_ms: float, draft_ms: float = 1.0) -> str:
    """Of one to eight ranks: a run of the target takes so long whatever its rows, so a text takes as long as a test
    wants."""
    models = ((8, "target", run_ms), (2, "draft", draft_ms))
    parts = [
        f"[models.{name}]\nlayers = {layers}\nembd = 288\nlayer_mb = {ms / layers}\nlayer_mparam = 1e-6\n"
        "output_mb = 1e-6\noutput_mparam = 1e-6\n"
        for layers, name, ms in models
    ]
    parts.append('[pairs.pair]\ntarget = "target"\ndraft = "draft"\nacceptance = [0.5]\n')
    parts.append('[nodes.node]\ngb_per_s = 1\ngflop_per_s = 1e6\n[[cluster]]\nnode = "node"\ncount = 8\n')
    return "".join(parts) + "[link]\nlatency_us = 10\ngbit_per_s = 10\n"
