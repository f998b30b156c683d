"""The fence of a cluster: a term in a ConfigMap, which admission policies compare with each placement
(`infra/kubernetes/fence.yaml`)."""

from typing import NamedTuple

import msgspec

from penstock.errors import PenstockError
from penstock_services.node_reporter.kubernetes.shell.api import Answer, ApiServer

NAME = "penstock-term"
LOST = ("penstock-term: this reporter was replaced", "no params found")
"""In refusals by the policy: the term is newer, or gone. Another refusal is none of the fence."""
CONFLICT, ABSENT = 409, 404


class FenceNotRaised(PenstockError):
    """The term could not be set."""


class _Metadata(msgspec.Struct, rename="camel"):
    resource_version: str = ""


class _ConfigMap(msgspec.Struct):
    metadata: _Metadata = msgspec.field(default_factory=_Metadata)
    data: dict[str, str] = msgspec.field(default_factory=dict)


class Term(NamedTuple):
    """The term in the ConfigMap. `raised`: by this call."""

    term: int
    raised: bool


async def raise_term(api: ApiServer, namespace: str, above: int, own: int = 0) -> Term:
    """Sets the term to one more than the larger of its value and `above`, by compare-and-set; not where
    `own`, the caller's term, is not 0 and another one is there. Raises `FenceNotRaised`, `Unanswered`."""
    folder = f"/api/v1/namespaces/{namespace}/configmaps"
    while True:
        found = await api.call("GET", f"{folder}/{NAME}")
        if found.done:
            known = msgspec.json.decode(found.body, type=_ConfigMap)
            present = _number(known.data.get("term", "0"))
            if own and present != own:
                return Term(present, raised=False)
            term = max(present, above) + 1
            body = _body(term) | {"metadata": _named(known.metadata.resource_version)}
            answer = await api.call("PUT", f"{folder}/{NAME}", body=body)
        elif found.status == ABSENT:
            term = above + 1
            answer = await api.call("POST", folder, body=_body(term) | {"metadata": _named()})
        else:
            raise _not_raised(namespace, found)
        if answer.done:
            return Term(term, raised=True)
        if answer.status != CONFLICT:
            raise _not_raised(namespace, answer)


def _body(term: int) -> dict[str, object]:
    return {"apiVersion": "v1", "kind": "ConfigMap", "data": {"term": str(term)}}


def _named(version: str = "") -> dict[str, str]:
    return {"name": NAME, **({"resourceVersion": version} if version else {})}


def _number(text: str) -> int:
    if not text.isdecimal():
        raise FenceNotRaised(
            f"ConfigMap {NAME}: term {text!r} is no number; restore the highest term of the pods"
        )
    return int(text)


def _not_raised(namespace: str, answer: Answer) -> FenceNotRaised:
    remedy = "create the namespace" if answer.status == ABSENT else "give the reporter get, create and update"
    return FenceNotRaised(f"ConfigMap {namespace}/{NAME}: {answer.reason}; {remedy}")
