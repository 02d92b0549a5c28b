"""What can be said of an architecture: where a model of it may be cut, and what a slice of it must be told. Knows none
by name; opens no file."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

Number = int | float

WHOLE, PART, FREE = "whole", "part", "free"


@dataclass(frozen=True, slots=True)
class Windows:
    """Layers that see only so many tokens back: the metadata's array says which, or else of every `period` layers all
    but the last are such, all but the first with `full_first`; a number in the metadata comes before `period`.

    Without `always` a model has them if its window is more than 0, and a slice may do without; with it libllama ends
    the process where a slice has none. With `leads` the first layer of a slice must have none: libllama takes the size
    of heads from it.
    """

    period: int = 0
    full_first: bool = False
    always: bool = True
    leads: bool = False


@dataclass(frozen=True, slots=True)
class States:
    """Layers that have a state instead of keys and values: those in whose place all arrays under `zero` have a 0, the
    first of them that of heads; else as the metadata's array under `key` says, or of every `period` layers (a number
    under `period_key` comes before) all but the last. With `all` every layer has a state."""

    zero: tuple[str, ...] = ()
    key: str = ""
    period: int = 0
    period_key: str = ""
    all: bool = False


@dataclass(frozen=True, slots=True)
class Refusal:
    """Of models whose number under `key` is `at_least` so much, or one of `values`; `models` says so to users."""

    models: str
    key: str
    why: str
    at_least: int | None = None
    values: tuple[int, ...] = ()

    def holds(self, number: object) -> bool:
        if not isinstance(number, int):
            return False
        return number in self.values or (self.at_least is not None and number >= self.at_least)


@dataclass(frozen=True, slots=True)
class Rescaled:
    """Of files with `n_layer` layers libllama divides queries by the root of n_embd / n_head, not by that of a head's
    length; of slices it does not know. What makes good for it is multiplied to `tensor` of each layer, or is that
    tensor where there is none. The same up to rounding."""

    n_layer: int
    tensor: str


@dataclass(frozen=True, slots=True)
class Architecture:
    """refused      why no model of it can be cut; empty if they can
    refusals     the same of some of its models
    own_output   libllama wants an output head beside the token table, also where only one of them is used
    heads        which lengths heads may have: WHOLE, keys and values of one length, all of it rotated; PART, not all of
                 it rotated; FREE, anything
    headless     some layers may have no heads
    windows      whether it has layers with a sliding window, and which
    states       whether it has layers with a state: a slice must have some with and some without, and a sequence cannot
                 go back, so that there is no speculation
    step         cuts are possible before every `step`th layer only; a text: the metadata's key of that number
    least        layers that a slice has at least
    first_with   arrays of the metadata that have no 0 for the first layer of a slice
    last_with    the same for the last layer
    lengths_not  numbers of layers that it must not have: libllama would take the slice for another model
    of_full      tensors without a layer that only layers without a window use: no slice may have them in vain
    always       numbers of the metadata that every slice has instead of the model's
    later        the same of slices after the first
    missing      numbers that a slice is told where the model's metadata lack them, from the numbers of layers and
                 tokens
    rescaled     what slices of one size of model need for their attention
    scaled       libllama scales the embeddings of tokens by the root of their length; what comes in as embeddings not
    input_node   of slices after the first, the node of the graph that is the first layer's input, where what comes in
                 as embeddings is changed before
    by_tokens    libllama cannot take embeddings, or reads their positions otherwise: all that comes in, embeddings of
                 tokens too, is written over `input_node`
    layer_node   the node that is a layer's result, without its number
    end_node     the same of a file's last layer, where it has another name
    selects      the metadata's key of how many earlier tokens a row sees at most, those with the highest scores; where
                 these are equal, by where the cells are, so that `exact` holds of texts of so many tokens alone
    exact        a row has the same bits in every batch with exact numerics
    flash        libllama gives it flash attention, which prompts in blocks need: others are read as guesses are
    """

    refused: str = ""
    refusals: tuple[Refusal, ...] = ()
    own_output: bool = False
    heads: str = WHOLE
    headless: bool = False
    windows: Windows | None = None
    states: States | None = None
    step: int | str = 1
    least: int = 1
    first_with: tuple[str, ...] = ()
    last_with: tuple[str, ...] = ()
    lengths_not: tuple[int, ...] = ()
    of_full: tuple[str, ...] = ()
    always: Mapping[str, Number] = field(default_factory=dict)
    later: Mapping[str, Number] = field(default_factory=dict)
    missing: Mapping[str, Callable[[int, int], Number]] = field(default_factory=dict)
    rescaled: Rescaled | None = None
    scaled: bool = False
    input_node: str = ""
    by_tokens: bool = False
    layer_node: str = "l_out"
    end_node: str = ""
    selects: str = ""
    exact: bool = True
    flash: bool = True
