"""The exceptions users meet. Everything else that escapes is a fault of ours."""


class UserError(Exception):
    """Bad input: the message names the value, the limit and the way out. The command ends with exit code 2."""


class JobError(UserError):
    """A UserError that every rank of a job raises: they leave together, and rank 0 prints the message."""


class StopRequested(Exception):
    """The user (Ctrl-C, SIGTERM) or a rank that was told to end asks for an orderly stop."""


class ModelFault(Exception):
    """A loaded model went bad: its file was changed, what it computes is no number, or its device is full. Exit code
    1."""
