"""Plain pipelined decoding, one token at a time: the baseline of all other policies."""

from dataclasses import dataclass
from typing import ClassVar

from pipeinfer.core.policy import NOTHING, Answer, Policy, PolicyView, Send


@dataclass(unsafe_hash=True)  # by its settings, which stay as they are
class Iterative(Policy):
    """Sends the root; never drafts."""

    name: ClassVar[str] = "iterative"
    drafts: ClassVar[bool] = False

    def send(self, context: PolicyView) -> Answer:
        root = context.tree.root
        return Send([root]) if root.run_id is None else NOTHING
