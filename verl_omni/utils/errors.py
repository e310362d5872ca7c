"""What ends a run and is shown to the user as one line, whichever process found it."""


class RunError(ValueError):
    """Its text is that line, in the user's words: what was wrong, what was expected, what to type instead."""
