"""What is shown to a user as one line, whichever process found it."""


class RunError(ValueError):
    """Ends the run. Its text is that line, in the user's words: what was wrong, what was expected, what to type."""


class Refused(Exception):
    """A request that a server does not take: the HTTP status, and one line in the user's words."""

    def __init__(self, status: int, words: str):
        super().__init__(words)
        self.status, self.words = status, words


class RequestAborted(RuntimeError):
    """A sample that was asked for and will not be drawn: whoever asked, or somebody else, has taken it back."""


class QueueFull(RuntimeError):
    """A server where too many wait already."""
