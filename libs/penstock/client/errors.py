"""The tree of the client's errors. Each has a message, the wrong fields with their remedies, and an exit
code.

ClientError
├── BadRequest        the job, the request or a setting is wrong; nothing was done
├── NotPermitted      no token, or one without the role
├── NotFound          no such job, node or record
├── Conflict          the request does not fit the present state, such as to cancel a job that has ended
│   └── KeyConflict   the idempotency key belongs to another job
├── Unreachable       no gateway answers, or it is overloaded, and stayed so
├── GatewayFault      the gateway failed, or its answer violates its contract
├── WaitTimeout       some jobs have not ended yet; they go on
└── JobNotSucceeded   `raise_for_outcome`: the job ended otherwise
"""

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

from penstock.errors import PenstockError
from penstock.exits import Exit, Stop


class BadField(NamedTuple):
    """One wrong field of a request."""

    field: str
    message: str
    remedy: str


class ClientError(PenstockError, Stop):
    """Base. `code`: exit code of a command that ends with it (`penstock.exits`)."""

    EXIT: ClassVar[Exit] = Exit.PROBLEM

    def __init__(
        self, text: str, *, fields: Sequence[BadField] = (), kind: str = "", status: int | None = None
    ) -> None:
        super().__init__(self.EXIT, text)
        self.fields = tuple(fields)
        """All wrong fields."""
        self.kind = kind
        """The last part of the problem's `type` (RFC 9457), such as `key_conflict`; stable."""
        self.status = status
        """Status of the gateway's answer; None: the client refused."""

    @property
    def remedy(self) -> str:
        """The remedy of each wrong field; else the text after the message's last semicolon."""
        if self.fields:
            return "; ".join(field.remedy for field in self.fields)
        return str(self).rpartition("; ")[2] if "; " in str(self) else ""


class BadRequest(ClientError):
    """The job, the request or a setting is wrong; nothing was done."""

    EXIT = Exit.BAD_SPEC


class NotPermitted(ClientError):
    """No token, or one without the role."""

    EXIT = Exit.NOT_ALLOWED


class NotFound(ClientError):
    """No such job, node or record."""


class Conflict(ClientError):
    """The request does not fit the present state."""


class KeyConflict(Conflict):
    """The idempotency key belongs to another job."""

    EXIT = Exit.KEY_CONFLICT


class Unreachable(ClientError):
    """No gateway answers, or it is overloaded, and stayed so."""

    EXIT = Exit.UNREACHABLE


class GatewayFault(ClientError):
    """The gateway failed, or its answer violates its contract."""


class WaitTimeout(ClientError):
    """Some jobs have not ended yet; they go on."""

    EXIT = Exit.WAIT_TIMEOUT


class JobNotSucceeded(ClientError):
    """The job ended otherwise; `code` is that of `penstock submit`."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


BY_STATUS: dict[int, type[ClientError]] = {
    400: BadRequest,
    401: NotPermitted,
    403: NotPermitted,
    404: NotFound,
    409: Conflict,
    413: BadRequest,
    415: BadRequest,
    422: BadRequest,
    429: Unreachable,
    503: Unreachable,
}


def fields_of(problem: dict[str, Any]) -> list[BadField]:
    """The wrong fields in a problem's `errors`; entries of another form are left out."""
    found = problem.get("errors")
    return [
        BadField(*(str(entry.get(name, "")) for name in BadField._fields))
        for entry in (found if isinstance(found, list) else ())
        if isinstance(entry, dict)
    ]
