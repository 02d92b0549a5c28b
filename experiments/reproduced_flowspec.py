"""FlowSpec's tables and figures beside ours, as lines of Markdown."""

from collections.abc import Iterator
from dataclasses import replace

from experiments.cells import Figures, Setting, over, run
from pipeinfer.policies import FlowSpec, PipeDec, PipeInfer
from pipeinfer.text import markdown_table

TOP1, AGEING = 0.84, 0.95
"""With these the first tree's guesses bring as many tokens a round as in table II, 4.89 and 5.02 (Chunk-PP)."""

THEIRS = FlowSpec.from_paper()
UNSCORED = replace(THEIRS, scored=False)
METHODS = {  # name -> policy, whether stages hear of what is dead
    "Chunk-PP": (replace(UNSCORED, expansion=False), False),
    "Pruned PP": (replace(UNSCORED, expansion=False), True),
    "without score order": (UNSCORED, True),
    "flowspec": (THEIRS, True),
    "pipedec": (PipeDec(layer_width=16), True),
}
PAIRS = ("llama2-7b", "llama2-13b")
OVER_CHUNKED = {  # pair -> the paper's tokens a second over Chunk-PP's, means of tables I and III, greedy
    "llama2-7b": ("6.08", "1.25", "1.38", "1.43", "1.16"),
    "llama2-13b": ("1.31", "", "", "1.69", "1.21"),
}
TABLE_2 = {  # ALT, ALR of Chunk-PP, FlowSpec, PipeDec
    "llama2-7b": ("0.54, 4.89", "1.01, 8.67", "0.59, 5.68"),
    "llama2-13b": ("0.55, 5.02", "1.01, 8.93", "0.59, 5.76"),
}
DEPTHS = (2, 5, 8)


def flowspec() -> Iterator[str]:
    yield "\n## FlowSpec: its own tables\n"
    yield (
        "The paper's settings with their ablations, in tokens a second and over `Chunk-PP`: the first tree in\n"
        "segments, all of them verified before the next tree is drafted. In brackets what the paper reports at\n"
        "1000 Mbit/s, the mean over its texts (greedy). It claims 1.2 to 1.4 over PipeDec with 16 nodes a layer,\n"
        "and that more than 90% of the speed is left at 125 Mbit/s (the last column). `ages`: the draft reads the\n"
        f"target's features, as EAGLE's does: its best guess is right {TOP1} of the time after a token that the\n"
        f"target has judged, and {AGEING} times as often for each token further on. Both are chosen such that\n"
        "Chunk-PP has some five tokens a round, as in table II, the one place on this page where a figure of a\n"
        "paper is fitted: Chunk-PP's rounds say nothing therefore. EAGLE's authors report 0.71 to 0.75 for the\n"
        "first; a head that was [trained here](heads.md) ages by 0.84 a token. `plain`: the best guess is right\n"
        "as often as EAGLE's authors report of its first one (0.73, 0.74), however far from there.\n"
    )
    columns = (
        "pair",
        "draft",
        "Mbit/s",
        *METHODS,
        "flowspec over pipedec",
        "ours: flowspec",
        "ours: pipeinfer",
        "over 1000 Mbit/s",
    )
    cells = [(pair, *cell) for pair in PAIRS for cell in ((True, 1.0), (True, 0.125), (False, 1.0))]
    yield from markdown_table(columns, (_row(*cell) for cell in cells))
    yield "\n### Table II: tokens a turn of the pipeline and a round of speculation (ALT, ALR)\n"
    yield (
        "A turn is as long as the slowest stage takes for a run; a round ends where no run in flight stands for the\n"
        "newest token. Draft that ages, 1000 Mbit/s, in brackets the paper's.\n"
    )
    yield from markdown_table(("pair", "Chunk-PP", "flowspec", "pipedec"), (_lengths_row(pair) for pair in PAIRS))
    yield "\n### Figure 6: depths\n"
    yield (
        "Llama 2 7B, 1000 Mbit/s, tokens a second by the depth of the first tree (rows) and of an expansion\n"
        "(columns), for the draft that ages. The paper: best at 5 and 5.\n"
    )
    yield from markdown_table(("d_0", *(f"d_se {depth}" for depth in DEPTHS)), (_depth_row(depth) for depth in DEPTHS))
    yield (
        "\n**What does not agree.** In the paper's table III pruning brings 1.26, expansion 1.10 and score order\n"
        "1.03. Pruning brings a little less here. Score order brings most of what `flowspec` has more over\n"
        "Chunk-PP with the draft that ages: the probabilities of a synthetic draft are exactly how often it is\n"
        "right, a real one's are not, so its order says less. Expansion brings more than 1.10 with either draft,\n"
        "most with the plain one, for which old guesses are as good as new ones. A round goes on for fewer tokens\n"
        "than theirs, although a turn brings as many: there each expansion drafts anew from a true feature and\n"
        "T_se has a depth of d_se from the new root; here a node is expanded once, with what the draft knew then,\n"
        "the old tree is kept, and d_se counts the layers beyond it. PipeDec's rounds are longer here than there.\n"
        "So the close ratio over PipeDec has other causes. A run goes out when the first stage is about to want\n"
        "it, not before (pacing), as in the paper's pipeline of stages in step. The best depth of the first tree\n"
        "agrees; for an expansion 2 is as good as 5. Activations travel as float32, since the text has to be that\n"
        "of the whole model; the paper's as float16. Of figure 5's bandwidths two are here. Temperature 1 is\n"
        "among the [real choices](#real-choices). Not compared: Megatron-LM and Galaxy (tensor parallelism), and\n"
        "Vicuna (the same costs as Llama 2)."
    )


def _setting(pair: str, ages: bool, gbit: float) -> Setting:
    setting = Setting("flowspec", pair, gbit=gbit)
    return replace(setting, acceptance=TOP1, ageing=(AGEING,)) if ages else setting


def _runs(setting: Setting) -> list[Figures]:
    return [run(setting, policy, cancel=cancel) for policy, cancel in METHODS.values()]


def _row(pair: str, ages: bool, gbit: float) -> list[str]:
    setting = _setting(pair, ages, gbit)
    runs = _runs(setting)
    speeds = [figures.speed for figures in runs]
    fast, papers = gbit == 1.0, OVER_CHUNKED[pair]
    cells = [f"{speeds[0]:.2f}" + (f" (paper {papers[0]})" if fast else "")]
    cells += [
        f"{speed:.2f} ({speed / speeds[0]:.2f}{', paper ' + paper if fast and paper else ''})"
        for speed, paper in zip(speeds[1:], papers[1:], strict=True)
    ]
    return [
        pair,
        "ages" if ages else "plain",
        f"{1000 * gbit:.0f}",
        *cells,
        over(runs[3], runs[4]),
        f"{run(setting, FlowSpec()).speed:.2f}",
        f"{run(setting, PipeInfer()).speed:.2f}",
        f"{speeds[3] / run(replace(setting, gbit=1.0), THEIRS).speed:.2f}",
    ]


def _lengths_row(pair: str) -> list[str]:
    chunked, *_, whole, layered = _runs(_setting(pair, True, 1.0))
    found = zip((chunked, whole, layered), TABLE_2[pair], strict=True)
    return [pair, *(f"{figures.per_turn:.2f}, {figures.per_round:.2f} ({paper})" for figures, paper in found)]


def _depth_row(depth: int) -> list[str]:
    setting = _setting("llama2-7b", True, 1.0)
    policies = (replace(THEIRS, depth=depth, expansion_depth=further) for further in DEPTHS)
    return [str(depth), *(f"{run(setting, policy).speed:.2f}" for policy in policies)]
