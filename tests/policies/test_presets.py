"""The presets of papers' policies, and widths: what is asked for is what is sent and what the tables say."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipeinfer.cli.simulate import simulate_command
from pipeinfer.core.policy import PAPER, PaperPolicy
from pipeinfer.core.runs import Run
from pipeinfer.core.settings import settings_of
from pipeinfer.job.options.options import Speculation
from pipeinfer.job.placement.job_plan import capacity_of
from pipeinfer.observe.columns import settings_text, variant_text
from pipeinfer.policies import POLICIES, Auto, FlowSpec, PipeDec, PipeInfer, PipeSpec, Speculative, make_policy
from pipeinfer.virtual.choices import ranks_for, synthetic_team
from pipeinfer.virtual.pipeline import SimPipeline
from pipeinfer.virtual.profile import load_profile
from pipeinfer.virtual.simulation import simulate

PUBLISHED: dict[str, dict[str, float]] = {
    "speculative": {"n_draft": 4, "width": 1, "accept_cutoff": 0.001},
    "pipeinfer": {
        "microbatch": 4,
        "width": 3,
        "accept_cutoff": 0.001,
        "split_cutoff": 0.8,
        "recovery": 0.4,
        "decay": 0.01,
    },
    "pipedec": {"children": 16, "layer_width": 32, "group": 1},
    "flowspec": {"depth": 5, "tree_size": 80, "width": 10, "segment": 16, "expansion_depth": 5, "expansion_size": 64},
    "pipespec": {"lookahead": 0},
    "ssd": {"n_draft": 7, "fan_out": 3},
}
ADDITIONS = {"pipeinfer": {"pacing", "best_first", "calibrated", "backoff", "pruning", "early"}, "ssd": {"ranked"}}
PAPERS = [name for name, kind in POLICIES.items() if issubclass(kind, PaperPolicy)]


@pytest.mark.parametrize("name", PAPERS)
def test_a_preset_has_the_papers_settings_and_none_of_our_additions(name: str) -> None:
    policy = make_policy(name, {"preset": PAPER, "cancel": False})
    values = {setting: getattr(policy, setting) for setting, _, _ in settings_of(type(policy))}
    assert values.items() >= PUBLISHED[name].items()
    assert {setting for setting, value in values.items() if value is False} == ADDITIONS.get(name, set())
    assert type(policy).from_paper() == policy != make_policy(name)  # type: ignore[attr-defined]
    assert make_policy(name) == POLICIES[name](), "ours is the default"


@pytest.mark.parametrize("name", POLICIES)
def test_a_fresh_policy_has_the_settings_and_shares_nothing(name: str) -> None:
    given = {"preset": PAPER, "width": 2, "asynchronous": False}
    policy = make_policy(name, {each: given[each] for each in given if hasattr(POLICIES[name], each)})
    fresh = policy.fresh()
    assert fresh == policy and type(fresh) is type(policy)
    shared = [
        each for each, own in vars(policy).items() if own is vars(fresh)[each] and vars(type(own)).get("__dict__")
    ]
    assert not shared


def test_a_setting_that_is_given_counts_before_the_preset() -> None:
    policy = make_policy("pipeinfer", {"preset": PAPER, "recovery": 0.0, "asynchronous": False})
    assert settings_text(policy) == "preset paper, microbatch 4, inflight 1000, width 3, recovery 0"
    assert variant_text(policy, cancel=True, partitions=True) == "no-async"


def test_tables_name_the_preset_and_not_what_it_switches() -> None:
    assert settings_text(PipeInfer.from_paper()) == "preset paper, microbatch 4, inflight 1000, width 3"
    assert not variant_text(PipeInfer.from_paper(), cancel=True, partitions=True)
    assert variant_text(PipeInfer(pacing=False), cancel=True, partitions=True) == "no-pacing"
    assert settings_text(PipeInfer()) == "microbatch 0, inflight 0, width 4"


def simulated(*more: str) -> str:
    done = CliRunner().invoke(simulate_command, ["--profile", "pipeinfer-c", "--nodes", "4", "-n", "16", *more])
    return done.output if done.exit_code == 0 else f"{done.exit_code}: {done.output}{done.exception}"


def test_simulate_takes_the_preset_and_results_have_it(tmp_path: Path) -> None:
    results = tmp_path / "results.csv"
    simulated("--policy", "speculative,pipeinfer,auto", "--preset", "paper", "--results", str(results))
    with results.open() as file:
        settings = [row["settings"] for row in csv.DictReader(file)]
    assert settings == ["preset paper, draft 4, width 1", "preset paper, microbatch 4, inflight 1000, width 3", ""]


def test_a_policy_without_a_paper_has_no_preset() -> None:
    said = simulated("--policy", "auto", "--preset", "paper")
    assert "--preset is an option of --policy speculative, pipeinfer" in said


# -- widths


WIDE = (
    PipeDec(layer_width=64),
    PipeDec(layer_width=128),
    FlowSpec(segment=64, tree_size=200),
    FlowSpec(segment=128, tree_size=300, expansion_size=200),
    Speculative(n_draft=64, width=8, accept_cutoff=0.0),
    PipeInfer(microbatch=64, width=16, accept_cutoff=0.0, split_cutoff=0.0),
)


@pytest.mark.parametrize("policy", WIDE, ids=settings_text)
def test_a_run_is_as_wide_as_was_asked(policy: PaperPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    submit = SimPipeline.submit

    def noted(pipeline: SimPipeline, run: Run) -> None:
        rows.append(len(run.rows))
        submit(pipeline, run)

    monkeypatch.setattr(SimPipeline, "submit", noted)
    profile = load_profile("pipedec-14").lay_out()
    (choices,) = synthetic_team([ranks_for(0.7)], 0, 8)
    simulate(profile, choices, policy.begin(), 24)
    asked = {"pipedec": "layer_width", "flowspec": "segment", "speculative": "n_draft", "pipeinfer": "microbatch"}
    width = getattr(policy, asked[policy.name]) + (policy.name == "speculative")  # the root goes with its tree
    assert max(rows) == width
    assert capacity_of(Speculation(policy=policy), 1, 128, 512, rewinds=True).n_nodes == width


def test_models_that_policies_share_have_room_for_the_widest() -> None:
    speculation = Speculation(policy=PipeInfer(microbatch=64), also=(Auto(), PipeSpec()))
    assert speculation.n_guess_rows == 64 and speculation.n_seq(1) == Auto.n_seq
