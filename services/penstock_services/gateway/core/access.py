"""Access control: roles, tenants, and the file of bearer tokens, of which only hashes are stored. Pure.

One line per token; empty lines and `#` comments are allowed:

    sha256:<64 hex digits> roles=submit,read tenant=vision name=ci
    sha256:<64 hex digits> roles=operate,read tenant=ops name=on-call
    sha256:<64 hex digits> roles=node node=n7

A plain hash is enough because tokens are random: `penstock token` makes them.
"""

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from hashlib import sha256
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from penstock.model.nouns.types import SHARED_TENANT, Identifier
from penstock.text.redaction import brief
from penstock_services.gateway.core.problems import Problem

MAX_TOKENS = 10_000
FIELDS = ("roles", "tenant", "node", "name")
NAMED = 12  # characters of its hash that identify a token without a name
HASH = re.compile(r"sha256:([0-9a-f]{64})\Z")


class Role(StrEnum):
    """What a caller may do. No role includes another."""

    SUBMIT = "submit"
    """Submit jobs of its tenant, and cancel those."""
    READ = "read"
    """Look at the cell, and at all of its tenant's jobs; of others' at what `visible` shows."""
    OPERATE = "operate"
    """Command nodes, cancel any job and, with `read`, see all of it; hand in estimates and proposals, replay,
    verify and rebuild."""
    NODE = "node"
    """Be the reporter of one node."""


class Caller(NamedTuple):
    """The sender of a request."""

    roles: frozenset[Role]
    tenant: str | None = None
    """Owner of the jobs that it submits; None: as the job's own field."""
    node: str | None = None
    """The node for which it may report; None: any, where it has the role."""
    name: str = ""
    """Name of the token, among those of its tenant."""
    lineage: tuple[str, ...] = ()
    """Of a task: its job, after the jobs by which that was submitted (`JobSpec.parents`).
    Empty: not a task."""

    @property
    def by(self) -> str:
        """The caller as events name it: `ops/on-call`."""
        return self.name if self.tenant is None else f"{self.tenant}/{self.name}"

    def may_act_for(self, owner: str) -> bool:
        """Whether the jobs of this owner are its own, or it may operate."""
        return Role.OPERATE in self.roles or self.tenant == owner

    def demand(self, what: str, *roles: Role) -> None:
        """Raises `Problem` 403 with the roles of which one is required, and the remedy."""
        if not self.roles.isdisjoint(roles):
            return
        have, role = ", ".join(sorted(self.roles)), " or ".join(roles)
        raise Problem(
            403,
            "no_role",
            f"{what} needs the role {role}, and this token has {have}; ask an operator for one with it: "
            f"`penstock token --roles {roles[0]} …`",
        )

    def demand_node(self, node_id: str, what: str) -> None:
        """Raises `Problem` 403 unless this is the reporter of that node."""
        self.demand(what, Role.NODE)
        if self.node not in (None, node_id):
            raise Problem(
                403, "other_node", f"{what}: this token speaks for node {self.node}, not for {node_id}"
            )

    def demand_own_tree(self, job_id: str, parents: Sequence[str], what: str) -> None:
        """Raises `Problem` 403 for a task, unless the job is its own or was submitted by it,
        also through others."""
        if not self.lineage or self.lineage[-1] in (job_id, *parents):
            return
        raise Problem(
            403,
            "other_job",
            f"{what} was not submitted by job {self.lineage[-1]}, whose token this is; a job acts "
            "on itself and on jobs that it submitted. Use a token of your own",
        )

    def demand_tenant(self, owner: str, what: str) -> None:
        """Raises `Problem` 403 unless the job is its own, or it may operate."""
        if self.may_act_for(owner):
            return
        raise Problem(
            403,
            "other_tenant",
            f"{what} belongs to {owner}, and this token to {self.tenant or 'no tenant'}; use a token of "
            f"{owner}, or one with the role operate",
        )


def local_caller(user: str) -> Caller:
    """The user who runs the gateway, on loopback without tokens."""
    return Caller(frozenset(Role), name=user)


Tokens = Mapping[bytes, Caller]
"""SHA-256 of the token → its caller."""


def digest(token: bytes) -> bytes:
    """The digest in the file, as raw bytes."""
    return sha256(token).digest()


def parse_tokens(text: str) -> Tokens:
    """Raises `ValueError` with line and remedy. The message, which every caller gets, holds no token."""
    found: dict[bytes, Caller] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            key, caller = _entry(words)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from error
        if key in found:
            raise ValueError(f"line {number}: this token stands in a line above, too; remove one")
        found[key] = caller
    if not 1 <= len(found) <= MAX_TOKENS:
        raise ValueError(
            f"holds {len(found)} tokens; give 1 to {MAX_TOKENS}, as `penstock token` prints them"
        )
    return MappingProxyType(found)


def token_line(token: str, caller: Caller) -> str:
    """The line for this token. Raises `ValueError`."""
    fields = caller._asdict()
    fields["roles"] = ",".join(sorted(caller.roles))
    line = " ".join([f"sha256:{digest(token.encode()).hex()}", *(f"{k}={v}" for k, v in fields.items() if v)])
    _entry(line.split())
    return line


def _entry(words: list[str]) -> tuple[bytes, Caller]:
    """Raises `ValueError`."""
    hashed = HASH.match(words[0])
    if hashed is None:
        raise ValueError(
            "begins with no hash; give sha256: and 64 hexadecimal digits, as `penstock token` prints them"
        )
    fields: dict[str, str] = {}
    for word in words[1:]:
        name, _, value = word.partition("=")
        if name not in FIELDS or name in fields:
            raise ValueError(
                f"{brief(name)} is not known, or given twice; give roles=, tenant=, node= and name="
            )
        fields[name] = value if name == "roles" else _named(name, value)
    fields.setdefault("name", f"token-{hashed[1][:NAMED]}")
    return bytes.fromhex(hashed[1]), _caller(fields)


def _named(field: str, value: str) -> str:
    """A name that is valid in events,
    so that no job is accepted that readers would reject. Raises `ValueError`."""
    try:
        return msgspec.convert(value, Identifier)
    except msgspec.ValidationError as error:
        raise ValueError(
            f"{field}={brief(value)} is not a name; give letters, digits, and . _ : / - between them"
        ) from error


def _caller(fields: Mapping[str, str]) -> Caller:
    """Raises `ValueError`."""
    names = list(filter(None, fields.get("roles", "").split(",")))
    if not names:
        raise ValueError(f"roles= is missing; give some of {', '.join(Role)}")
    for name in names:
        if name not in set(Role):
            raise ValueError(f"{brief(name)} is not a role; give some of {', '.join(Role)}")
    roles = frozenset(map(Role, names))
    caller = Caller(roles, fields.get("tenant"), fields.get("node"), fields["name"])
    if caller.tenant == SHARED_TENANT:
        raise ValueError(f"tenant={SHARED_TENANT} stands for all tenants' secrets; choose another name")
    if Role.SUBMIT in roles and caller.tenant is None:
        raise ValueError("tenant= is missing; a token that submits needs one, the owner of its jobs")
    if Role.NODE in roles and caller.node is None:
        raise ValueError("node= is missing; the role node is one node's")
    return caller
