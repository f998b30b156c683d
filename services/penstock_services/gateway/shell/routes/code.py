"""`/v1/code`: archives of jobs' working folders, stored once per tenant and digest, fetched by nodes."""

from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi import Path as InPath
from fastapi.responses import FileResponse, Response

from penstock.model.jobs.job_spec import JobSpec
from penstock_services.gateway.core.access import Role
from penstock_services.gateway.core.problems import BadField, Problem, invalid
from penstock_services.gateway.shell.access.roles import caller_of, needs
from penstock_services.gateway.shell.code_store import CodeStore
from penstock_services.gateway.shell.gateway import Gateway, answer, content_type, gateway_of

router = APIRouter(prefix="/v1/code", tags=["code"])

TYPE = "application/octet-stream"
Digest = Annotated[str, InPath(pattern="^[0-9a-f]{64}$", description="SHA-256 of the archive")]
BODY = {
    "requestBody": {
        "required": True,
        "content": {
            TYPE: {"schema": {"type": "string", "format": "binary", "description": "tar, packed with gzip"}}
        },
    }
}


@router.get("/{digest}", dependencies=[needs(Role.SUBMIT)])
async def code(digest: Digest, request: Request) -> Response:
    """Whether the caller's tenant has stored this archive: `stored`, `bytes`."""
    path = _store(gateway_of(request)).path(caller_of(request).tenant, digest)
    size = path.stat().st_size if path.is_file() else None
    return answer({"digest": digest, "stored": size is not None, "bytes": size})


@router.put("/{digest}", status_code=201, openapi_extra=BODY, dependencies=[needs(Role.SUBMIT)])
async def put_code(digest: Digest, request: Request) -> Response:
    """Store an archive for the jobs of the caller's tenant. Its SHA-256 is compared."""
    if content_type(request) != TYPE:
        raise Problem(415, "content_type", f"send {TYPE}")
    gateway = gateway_of(request)
    live = {job.spec.code for job in gateway.follower.state.jobs.values() if job.spec.code is not None}
    size = await _store(gateway).put(caller_of(request).tenant, digest, request.stream(), live)
    return answer({"digest": digest, "stored": True, "bytes": size}, 201)


@router.get("/{digest}/archive", response_class=FileResponse, dependencies=[needs(Role.NODE)])
async def archive(
    digest: Digest,
    request: Request,
    owner: Annotated[str, Query(max_length=128, description="Of the job that runs in it")],
) -> Response:
    """The archive, for a node that runs a job of this owner."""
    found = _store(gateway_of(request)).find(owner, digest)
    if found is None:
        raise Problem(
            404,
            "no_code",
            f"no code {digest} of {owner} is stored here; submit the job again with its folder",
        )
    return FileResponse(found, media_type=TYPE)


def refuse_missing(gateway: Gateway, tenant: str | None, spec: JobSpec) -> None:
    """Raises `Problem` for a job whose code is not stored."""
    if spec.code is None:
        return
    path = _stored(gateway, tenant, spec.code)
    if path is None:
        remedy = f"put its archive to /v1/code/{spec.code} first"
        raise invalid("this job cannot run", [BadField("code", "is not stored here", remedy)])
    _store(gateway).used(path)


def _stored(gateway: Gateway, tenant: str | None, digest: str) -> Path | None:
    path = _store(gateway).path(tenant, digest)
    return path if path.is_file() else None


def _store(gateway: Gateway) -> CodeStore:
    """Raises `Problem`."""
    if gateway.options.code_dir is None:
        detail = (
            "no code is stored here; start the gateway with PENSTOCK_CODE_DIR, or name a workdir that "
            "the nodes have"
        )
        raise Problem(404, "no_code_store", detail)
    return CodeStore(gateway.options.code_dir)
