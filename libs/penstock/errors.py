"""The tree of errors.

PenstockError
├── LogError                  the log could not do what was asked
│   ├── AppendFailed          outcome unknown: the records may or may not be in the log
│   │   └── OffsetTaken       another record has the offset that was asked for; nothing was written
│   ├── NotAllowed            this identity may not do that (Kafka ACL); nothing was written
│   ├── TooLarge              a record exceeds MAX_RECORD_BYTES; nothing of the batch was written
│   └── OffsetOutOfRange      the asked position is no longer, or not yet, in the log
├── StoreError                Postgres could not do what was asked
└── ConfigurationError        a setting is missing or unusable; names the setting and the remedy
    └── FileMissing           a setting's file is not there, or not yet
"""

from traceback import format_exception_only

MAX_LINE = 1_024  # characters; as long as a short text of an event


class PenstockError(Exception):
    """Base of every error that is raised on purpose."""


class LogError(PenstockError):
    """The log could not do what was asked."""


class AppendFailed(LogError):
    """The append's outcome is unknown:
    a placer that writes to this log drops its state and folds again (LAW 3)."""


class OffsetTaken(AppendFailed):
    """Another record has the offset that a record had to get; nothing of the batch was written."""


class NotAllowed(LogError):
    """The log refused this identity; nothing was written."""


class TooLarge(LogError):
    """A record exceeds the bound; nothing of the batch was written."""


class OffsetOutOfRange(LogError):
    """The asked position is not in the log."""


class StoreError(PenstockError):
    """Postgres could not do what was asked."""


class ConfigurationError(PenstockError):
    """A setting is missing or unusable. The message names the setting and the remedy."""


class FileMissing(ConfigurationError):
    """A setting's file is not there. It may come later: a service ends with status 1, to be started again."""


REMEDIES = {
    "PENSTOCK_DSN_FILE": "`python -m penstock.local.postgres_setup` writes one for each service",
    "PENSTOCK_LOG_FILE": "`python -m penstock.local.postgres_setup --node NODE` writes one for each node",
    "PENSTOCK_OPERATOR_KEY": "make one for placer and gateway with `head -c 32 /dev/urandom`",
    "PENSTOCK_TOKENS": "`penstock token` makes tokens",
    "--gateway-token-file": "`penstock token` makes tokens",
}
"""Setting → what makes its file."""


def unreadable(setting: str, path: object, error: OSError) -> ConfigurationError:
    """For the file of a setting; `FileMissing` where there is none."""
    if isinstance(error, FileNotFoundError):
        return FileMissing(f"{setting}: {path} is missing; {REMEDIES.get(setting, 'give a readable file')}")
    return ConfigurationError(f"{setting}: {path} cannot be read: {error.strerror}; give a readable file")


def one_line(error: BaseException) -> str:
    """The last line of the error's traceback, and where it was raised; at most MAX_LINE characters."""
    where, trace = "", error.__traceback__
    while trace is not None:
        where = f"{trace.tb_frame.f_globals.get('__name__', '?')}, line {trace.tb_lineno}"
        trace = trace.tb_next
    text = f"{format_exception_only(error)[-1].strip()} ({where})"
    return text.encode("utf-8", "replace").decode()[:MAX_LINE]
