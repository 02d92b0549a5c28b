"""What the user was told of guesses: each change is said once. Requests of one session share it. Knows no measure."""

from dataclasses import dataclass

REST, GO_ON = "guesses cost time here", "guesses save time again: speculation goes on"
SILENT = "hardly any guess of the draft is right: only single tokens are sent, guesses are tried now and then"
RESUMED = "the draft's guesses are right again: speculation goes on"


@dataclass
class Told:
    """`cost_time`, `are_wrong`: what was said last of them."""

    cost_time: bool = False
    are_wrong: bool = False

    def of_time(self, cost_time: bool, figures: str) -> str:
        """The line to say, empty if it was said. `figures`: beside the line that they cost time."""
        if self.cost_time is cost_time:
            return ""
        self.cost_time = cost_time
        return f"{REST}: {figures}; they are tried again now and then" if cost_time else GO_ON

    def of_hits(self, are_wrong: bool) -> str:
        """The same of how often they are right."""
        if self.are_wrong is are_wrong:
            return ""
        self.are_wrong = are_wrong
        return SILENT if are_wrong else RESUMED
