"""The exceptions that users see. Any other one that escapes is a fault of this package."""


class UserError(Exception):
    """Bad input: the message names the value, the limit and the way out. The command ends with exit code 2."""


class JobError(UserError):
    """A UserError that every rank of a job raises: they leave together, and rank 0 prints the message."""


class HostFault(UserError):
    """This host could not do what it was asked, and may another time: it is no answer to what was asked."""


class StopRequested(Exception):
    """The user (Ctrl-C, SIGTERM), or another rank, requests an orderly stop."""


class ModelFault(Exception):
    """A loaded model failed: its file was changed, its results are no numbers, or its device is full. Exit code 1."""
