"""The exceptions that users see. Any other one that escapes is a fault of this package."""


class UserError(Exception):
    """Bad input: the message names the value, the limit and the way out. The command ends with exit code 2."""


class JobError(UserError):
    """A UserError that every rank of a job raises: they leave together, and rank 0 prints the message."""


class HostFault(UserError):
    """This host could not do what it was asked, and may another time: it is no answer to what was asked."""


class ContextOverflow(UserError):
    """A prompt of `n_prompt` tokens, or of `at_least` so many, is too long. In llama-server's words, by which clients
    know that a shorter conversation helps; `more`: the reason and the way out."""

    def __init__(self, n_prompt: int, n_ctx: int, more: str, at_least: bool = False) -> None:
        request = f"the request ({'at least ' * at_least}{n_prompt} tokens)"
        super().__init__(f"{request} exceeds the available context size ({n_ctx} tokens): {more}")
        self.n_prompt, self.n_ctx = n_prompt, n_ctx


class StopRequested(Exception):
    """The user (Ctrl-C, SIGTERM), or another rank, requests an orderly stop."""


class ModelFault(Exception):
    """A loaded model failed: its file was changed, its results are no numbers, or its device is full. Exit code 1."""
