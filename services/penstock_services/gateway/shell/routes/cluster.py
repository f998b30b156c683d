"""The cell as a whole: nodes, GPUs, queue, decisions, status."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from itertools import islice
from operator import attrgetter
from typing import Annotated, Any, NamedTuple

import orjson
from fastapi import APIRouter, Depends, Path, Query, Request
from fastapi.responses import Response

from penstock.errors import ConfigurationError, LogError
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.ledger.views import Row, distrust, doubt, gpu_use
from penstock.log.archived import ArchivedLog
from penstock.log.over import layer
from penstock.log.port import Partition
from penstock.model.nouns.transitions import JobStatus
from penstock.model.schema.topics import Topic
from penstock.model.wire.codec import as_written
from penstock.why.explain import explain
from penstock.why.queue_position import Line, line_of
from penstock_services.gateway.core.access import Caller, Role
from penstock_services.gateway.core.cursor import MAX_SEQ
from penstock_services.gateway.core.forecasts.deadline import answer as deadline_row
from penstock_services.gateway.core.forecasts.deadline import failed, outlooks
from penstock_services.gateway.core.log_text import Unreadable
from penstock_services.gateway.core.problems import Problem
from penstock_services.gateway.core.visible import event_for, reason_for, sees_all
from penstock_services.gateway.shell.access.roles import caller_of, needs
from penstock_services.gateway.shell.gateway import Gateway, answer, gateway_of, require_live, row_json
from penstock_services.gateway.shell.routes.commands.operators import jobs_on
from penstock_services.gateway.shell.routes.jobs import Labels, Text

router = APIRouter(prefix="/v1", tags=["cell"])

MAX_LISTED = 1_000
MAX_EXPLAINED = 200  # of a queue, each at about a placement's cost; the others are listed without a reason
WAITING = (JobStatus.SUBMITTED, JobStatus.QUEUED, JobStatus.BACKOFF)


Limit = Annotated[int, Query(ge=1, le=MAX_LISTED)]


@router.get("/nodes", dependencies=[needs(Role.READ)])
async def nodes(request: Request) -> Response:
    """All nodes with their free resources."""
    gateway = gateway_of(request)
    await gateway.fresh()
    rows = await gateway.store.rows("SELECT row_to_json(nodes)::text FROM nodes ORDER BY node_id")
    return answer({"nodes": [_with_doubt(gateway, row) for row in rows]})


def _with_doubt(gateway: Gateway, row: str) -> orjson.Fragment:
    """The row with the keys `labels`, `suspicion` and `distrust`, as of the latest record."""
    state = gateway.follower.state
    live = state.nodes.get(orjson.loads(row)["node_id"])
    found = ({}, None, None) if live is None else (live.spec.labels, doubt(state, live), distrust(live))
    labels, silent, failing = (orjson.dumps(each).decode() for each in found)
    return row_json(f'{row[:-1]},"labels":{labels},"suspicion":{silent},"distrust":{failing}}}')


def _logs(gateway: Gateway, node_id: str) -> dict[str, str | None]:
    """Where the gateway fetches the output of a node's tasks, or why it cannot."""
    try:
        return {"url": gateway.logs.server_of(node_id)[0], "problem": None}
    except Unreadable as error:
        return {"url": None, "problem": str(error)}


@router.get("/nodes/{node_id:path}/events", dependencies=[needs(Role.READ)])
async def node_events(node_id: str, request: Request, limit: Limit = MAX_LISTED) -> Response:
    """The latest events of the node itself, in order; those of tasks there are their jobs'."""
    gateway = gateway_of(request)
    rows = await gateway.fresh_rows(
        "SELECT row_to_json(latest)::text FROM (SELECT * FROM events WHERE node_id = $1 AND job_id IS NULL "
        "ORDER BY seq DESC, n DESC LIMIT $2) AS latest ORDER BY seq, n",
        node_id,
        limit,
    )
    if not rows:
        raise Problem(404, "no_node", f"no node {node_id!r} has ever joined; GET /v1/nodes lists them")
    return answer({"node_id": node_id, "events": rows})


@router.get("/nodes/{node_id:path}", dependencies=[needs(Role.READ)])
async def node(node_id: str, request: Request) -> Response:
    """One node with its GPUs, and the jobs on it as of the latest record."""
    gateway = gateway_of(request)
    await gateway.fresh()
    text = await gateway.store.row(
        "SELECT (to_jsonb(nodes) || jsonb_build_object('gpu_list', (SELECT coalesce(jsonb_agg(to_jsonb(g) "
        "ORDER BY g.gpu), '[]') FROM gpus AS g WHERE g.node_id = nodes.node_id AND g.uuid <> '')))::text "
        "FROM nodes WHERE node_id = $1",
        node_id,
    )
    if text is None:
        raise Problem(404, "no_node", f"no node {node_id!r}; GET /v1/nodes lists them")
    live = gateway.follower.state.nodes.get(node_id)
    found = orjson.loads(text)
    found["gpu_list"] = [{**gpu, **_held(gateway, gpu)} for gpu in found["gpu_list"]]
    more = {
        "jobs": [] if live is None else jobs_on(live),
        "connected": node_id in gateway.connections,
        "logs": _logs(gateway, node_id),
        "suspicion": None if live is None else doubt(gateway.follower.state, live),
        "distrust": None if live is None else distrust(live),
        "labels": {} if live is None else live.spec.labels,
    }
    return answer({**found, **more})


@router.get("/gpus", dependencies=[needs(Role.READ)])
async def gpus(request: Request) -> Response:
    """All GPUs; `holders`: the tasks on each as of the latest record, `share_milli` and `free_milli` in
    thousandths of it."""
    gateway = gateway_of(request)
    await gateway.fresh()
    texts = await gateway.store.rows(
        "SELECT row_to_json(gpus)::text FROM gpus WHERE uuid <> '' ORDER BY node_id, gpu"
    )
    rows = [orjson.loads(text) for text in texts]
    return answer({"gpus": [{**row, **_held(gateway, row)} for row in rows]})


def _held(gateway: Gateway, row: dict[str, Any]) -> Row:
    """The tasks that hold the GPU of this row, and its free share."""
    state = gateway.follower.state
    node = state.nodes.get(row["node_id"])
    return (
        {"holders": [], "free_milli": 0, "suspect": False}
        if node is None
        else gpu_use(state, node, row["gpu"])
    )


class Filters(NamedTuple):
    """Parameters that choose among the jobs that have not ended."""

    owner: str | None
    name: str | None
    label: list[str] | None

    def chosen(self, state: CellState, caller: Caller) -> list[JobState]:
        """Name and labels of another tenant's job are hidden, so these filters do not match it."""
        jobs = list(state.jobs.values())
        if self.owner is not None:
            jobs = [job for job in jobs if job.spec.owner == self.owner]
        if self.label or self.name:
            jobs = [job for job in jobs if caller.may_act_for(job.spec.owner)]
        if self.name is not None:
            jobs = [job for job in jobs if job.spec.name == self.name]
        if self.label:
            labels = dict.fromkeys(tuple(text.split("=", 1)) for text in self.label)
            jobs = [job for job in jobs if labels.keys() <= job.spec.labels.items()]
        return jobs


async def filters_of(owner: Text = None, name: Text = None, label: Labels = None) -> Filters:
    """Asynchronous, since FastAPI gives a plain dependency to a thread."""
    return Filters(owner, name, label)


Filtered = Annotated[Filters, Depends(filters_of)]


@router.get("/queue", dependencies=[needs(Role.READ), Depends(require_live)])
async def queue(request: Request, filters: Filtered, limit: Limit = 100) -> Response:
    """Jobs that wait, first in line first, each with its reason as of the latest record. `waiting`: how many
    there are of this kind."""
    follower, caller = gateway_of(request).follower, caller_of(request)
    state, now_ms = follower.state, follower.now_ms()
    waiting = {job.job_id: job for job in filters.chosen(state, caller) if job.status in WAITING}
    line, first = _first(state, waiting, limit, now_ms)
    rows: list[dict[str, object]] = []
    for number, job in enumerate(first):
        row: dict[str, object] = {"job_id": job.job_id, "status": str(job.status)}
        if number < MAX_EXPLAINED:
            row |= as_written(explain(state, job.job_id, now_ms, line))
        row |= {"name": job.spec.name, "owner": job.spec.owner}
        rows.append(reason_for(caller, row, job.spec.owner))
    head = {"seq": state.seq, "record_ms": state.now_ms, "now_ms": now_ms, "waiting": len(waiting)}
    return answer({**head, "jobs": rows})


def _first(
    state: CellState, waiting: Mapping[str, JobState], limit: int, now_ms: int
) -> tuple[Line | None, list[JobState]]:
    """The order of the queue, and the first `limit` of these jobs in it; jobs that are not in the queue come
    last, by submission. The order is None where the policy has a bug: each job's reason names it."""
    line: Line | None = None
    ids: list[str] = []
    try:
        line = line_of(state, now_ms)
        order = () if line.places is None else line.places  # its truth would compute the whole order
        ids = list(islice(filter(waiting.__contains__, order), limit))
    except Exception:  # noqa: BLE001 - see above
        line, ids = None, []
    if len(ids) < limit:
        found = set(ids)
        rest = sorted((job for job in waiting.values() if job.job_id not in found), key=attrgetter("order"))
        ids += [job.job_id for job in rest[: limit - len(ids)]]
    return line, [waiting[job_id] for job_id in ids]


@router.get("/deadlines", dependencies=[needs(Role.READ), Depends(require_live)])
async def deadlines(request: Request, filters: Filtered, limit: Limit = 100) -> Response:
    """Jobs of the caller's tenant with a deadline or a service class that have not ended: lowest odds first,
    then those with unknown odds.

    `odds`: that it ends by `due_ms`, null with `unknown`; `ends_ms`: expected end; `sure_ms`: by when it ends
    with odds of `level`; `deadline_ms`: the shortest deadline, after its submission, that holds with these;
    `qos`: its class, empty where it names a deadline. `timed`: their number.
    """
    follower, caller = gateway_of(request).follower, caller_of(request)
    state, now_ms = follower.state, follower.now_ms()
    timed = [
        job
        for job in filters.chosen(state, caller)
        if job.spec.timed and (sees_all(caller) or caller.may_act_for(job.spec.owner))
    ]
    try:
        found = outlooks(state, timed, now_ms, follower.forecasts)
    except Exception as error:  # noqa: BLE001 - a bug of the policy
        found = [failed(job, now_ms, error) for job in timed]
    rows = []
    for one in found[:limit]:
        job = state.jobs[one.job_id]
        names = {"name": job.spec.name, "owner": job.spec.owner, "status": job.status}
        rows.append({**(deadline_row(one) or {}), **names})
    head = {"seq": state.seq, "record_ms": state.now_ms, "now_ms": now_ms, "timed": len(timed)}
    return answer({**head, "jobs": rows})


@router.get("/decisions", dependencies=[needs(Role.READ)])
async def decisions(
    request: Request,
    job: Annotated[str | None, Query(max_length=128)] = None,
    kind: Annotated[str | None, Query(max_length=128)] = None,
    before: Annotated[int | None, Query(ge=0, le=MAX_SEQ)] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = 50,
) -> Response:
    """Decisions, the latest first, each with its reasons."""
    rows = await _decisions(
        request,
        "($1::text IS NULL OR job_id = $1) AND ($2::text IS NULL OR kind = $2) AND ($3::bigint IS NULL OR "
        "seq < $3) ORDER BY seq DESC, n DESC LIMIT $4",
        job,
        kind,
        before,
        limit,
    )
    return answer({"decisions": rows})


@router.get("/decisions/{seq}", dependencies=[needs(Role.READ)])
async def decision(seq: Annotated[int, Path(ge=0, le=MAX_SEQ)], request: Request) -> Response:
    """All decisions of the placer in one ledger record."""
    rows = await _decisions(request, "seq = $1 ORDER BY n", seq)
    if not rows:
        raise Problem(404, "no_decision", f"record {seq} holds no decision; GET /v1/decisions lists them")
    return answer({"seq": seq, "decisions": rows})


async def _decisions(request: Request, where: str, *arguments: Any) -> list[Any]:
    """Rows of decisions, as the caller may see them."""
    gateway, caller = gateway_of(request), caller_of(request)
    await gateway.fresh()
    rows = await gateway.store.with_owners("decisions", where, *arguments)
    if sees_all(caller):
        return [row_json(row["found"]) for row in rows]
    return [event_for(caller, orjson.loads(row["found"]), row["owner"]) for row in rows]


@router.get("/ledger", dependencies=[needs(Role.READ)])
async def ledger(request: Request) -> Response:
    """Where the ledger begins and ends, and its archive: `problem` is empty where both are one ledger."""
    gateway = gateway_of(request)
    place = Partition(Topic.LEDGER, gateway.settings.cell_index)
    log, archived, problem = gateway.log, None, ""
    whole = layer(log, ArchivedLog)
    try:
        end = (await log.end_offsets([place]))[place]
        begin = (await (log if whole is None else whole.inner).begin_offsets([place]))[place]
        if whole is not None:
            archived = {"folder": str(whole.archive.folder), "begin": begin, "end": begin}
            index = (await whole.indexes({place: begin})).get(place)
            if index is not None:
                archived |= {"begin": index.first, "end": index.end}
            lacking = await asyncio.to_thread(whole.archive.lacking, place)
            if lacking:
                problem = f"{len(lacking)} segments of the archive cannot be read, the first is {lacking[0]}"
        elif begin > 0:
            problem = f"its first {begin} records were archived, and the gateway has no PENSTOCK_ARCHIVE"
    except ConfigurationError as error:
        problem = str(error)
    except LogError as error:
        raise Problem(503, "log_down", f"the log is away: {error}", retry_after_s=2) from error
    return answer({"begin": begin, "end": end, "archive": archived, "problem": problem})


@router.get("/status", dependencies=[needs(Role.READ)])
async def status(request: Request) -> Response:
    """Positions of the cell's ledger and its read models."""
    gateway = gateway_of(request)
    state, cell_index = gateway.follower.state, gateway.settings.cell_index
    stands = gateway.follower.undecodable
    ledger, letters = Partition(Topic.LEDGER, cell_index), Partition(Topic.DEAD_LETTERS, 0)
    try:
        ends = await gateway.log.end_offsets([ledger, letters])
    except LogError as error:
        raise Problem(503, "log_down", f"the log is away: {error}", retry_after_s=2) from error
    return answer(
        {
            "cell": gateway.settings.cell,
            "seq": state.seq,
            "term": state.term,
            "now_ms": state.now_ms,
            "log_ms": gateway.follower.log_ms,
            "frozen": state.frozen,
            "undecodable": None if stands is None else stands.row(),
            "profile": state.settings.profile,
            "alarm": None if gateway.alarms.current is None else as_written(gateway.alarms.current),
            "failed_choices": as_written(state.failed_choices),
            "projected_seq": gateway.store.projected_seq,
            "projector_lag": max(0, state.seq - gateway.store.projected_seq),
            "gateway_lag": max(0, ends[ledger] - gateway.follower.replica.offset),
            "dead_letters": ends[letters],
            "in_flight": gateway.appender.in_flight,
            "streams": gateway.streams,
            "jobs": Counter(str(job.status) for job in state.jobs.values()),
            "nodes": Counter(str(found.status) for found in state.nodes.values()),
        }
    )
