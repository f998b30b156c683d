"""The simulator's exit codes, and what is wrong with a command line."""

OK, PROBLEM, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
EPILOG = (
    "exit codes: 0 done; 1 an invariant broke, or the truth has no answer for a placement; 2 bad command line or "
    "trace; 130 stopped by Ctrl-C, with the figures so far"
)


class BadCommand(ValueError):
    """The command line asks for something that does not exist; the message says what does."""
