"""Sections of options about ranks: how they are watched, devices of other machines, and tensors that are not where
their layers are. See `sections`."""

from dataclasses import dataclass
from itertools import chain

from pipeinfer.cluster.watch.protocol import LEAST_S, MOST_S, Limits
from pipeinfer.core.settings import setting
from pipeinfer.job.options.limits import ALL_LAYERS, MAX_LAYERS
from pipeinfer.job.options.values import SERVERS, WHOLE, Joined, Listed, Number, Parsed
from pipeinfer.models.llama.tensor_places import TensorPlace

TIMEOUT_HELP = (
    f"Seconds without a sign of a rank after which it is named and the job ends. [default: {Limits().link_s:g} where "
    f"its host cannot be reached, {Limits().silent_s:g} where its process stands still]"
)


def _expert_layers(text: str) -> int:
    if text != "all" and not (WHOLE.fullmatch(text) and 0 <= int(text) <= MAX_LAYERS):
        raise ValueError(f"is neither a number of layers, 0 to {MAX_LAYERS}, nor all")
    return ALL_LAYERS if text == "all" else int(text)


EXPERT_LAYERS = Parsed("number or all", _expert_layers)
TENSOR_PLACE = Parsed("pattern=device", TensorPlace.parse)


@dataclass(frozen=True, kw_only=True)
class Servers:
    """How ranks are watched, and their devices that are not in their hosts.

    rpc: llama.cpp's RPC servers, whose devices are devices of a rank, RPC0 and so on: HOST:PORT, or several,
        HOST:PORT+HOST:PORT; none. One value, or one a rank: a server serves one rank at a time.
    """

    heading = "Ranks"
    rank_timeout_s: float | None = setting(None, "--rank-timeout", type=Number(LEAST_S, MOST_S), help=TIMEOUT_HELP)
    rpc: tuple[tuple[str, ...], ...] = setting(((),), "--rpc", type=Listed(SERVERS), written="none", column=True)

    def servers_of(self, rank: int, n_ranks: int) -> tuple[str, ...]:
        """A lone rank has all."""
        return self.rpc[rank % len(self.rpc)] if n_ranks > 1 else tuple(chain.from_iterable(self.rpc))


@dataclass(frozen=True, kw_only=True)
class TensorOptions:
    """Tensors of -ngl layers that are not on the devices of their layers.

    n_cpu_moe: Of models with experts: those of the first N layers of each rank's slice stay in its host's memory, and
        its CPU computes them; all. One value, or one a rank: 4,all,0.
    cpu_moe: The same of all layers, on every rank.
    override_tensor: Tensors whose names match are on that device: CPU, or one of the rank's, as --device names it. A
        regular expression, with layers of the whole model: "blk.(2|3).ffn_.*_exps=CPU"; several with commas, or the
        option again. The first that matches counts, before -ncmoe and -cmoe.
    """

    heading = "Ranks"
    n_cpu_moe: tuple[int, ...] = setting((0,), "--n-cpu-moe", "-ncmoe", type=Listed(EXPERT_LAYERS), column=True)
    cpu_moe: bool = setting(False, "--cpu-moe", "-cmoe", column=True)
    override_tensor: tuple[TensorPlace, ...] = setting(
        (), "--override-tensor", "-ot", type=Joined(TENSOR_PLACE), repeated=True, column=True
    )
