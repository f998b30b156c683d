"""Who may say what about what: the speaker and the subject of each type of event on a topic, and what proves
the speaker.

Facts without a topic exist in the placer's records only. Source: architecture §2, LAW 1.
"""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

from penstock.model import proposals
from penstock.model.decisions import ledger_events, orders
from penstock.model.decisions.adjustments import TaskAdjusted
from penstock.model.inputs import estimates, external_events
from penstock.model.inputs.amendments import LedgerAmended
from penstock.model.inputs.command_runs import JobCommandRun
from penstock.model.inputs.dead_letters import DeadLettered
from penstock.model.inputs.followers import FollowerChanged
from penstock.model.inputs.saves import SaveRefused
from penstock.model.schema.event import Event


class Speaker(StrEnum):
    """A sender of events. Its proof is the right to write the topic, and more where that is said."""

    USER = "user"
    """Through the gateway, which knows tenant and role."""
    GATEWAY = "gateway"
    """Of its own connections; by no request."""
    OPERATOR = "operator"
    """A command, a watch or a probe about a node, or an amendment: the gateway's signature, or the placer's
    own."""
    NODE = "node"
    """The node's own signature, with the key of its first joining."""
    ESTIMATOR = "estimator"
    PROPOSER = "proposer"
    """A service that proposes, or the gateway for an operator; the placer answers (LAW 1)."""
    PLACER = "placer"
    ANY = "any service"
    NOBODY = "nobody"
    """No service sends such events: one that comes is a dead letter."""


class Subject(StrEnum):
    """What a speaker may speak about."""

    JOB = "job"
    """Of the tenant, or any for operators and services."""
    NODE = "node"
    """Any."""
    OWN_NODE = "own node"
    OWN_TASK = "task on its node"
    """Placed there by the ledger, under the order's token."""
    RECORD = "ledger record"
    """One that no reader can decode."""
    NOTHING = ""


class Rule(NamedTuple):
    speaker: Speaker
    subject: Subject


_OF_JOBS = Rule(Speaker.USER, Subject.JOB)
_OF_NODES = Rule(Speaker.OPERATOR, Subject.NODE)
_OF_ITSELF = Rule(Speaker.NODE, Subject.OWN_NODE)
_OF_ITS_TASKS = Rule(Speaker.NODE, Subject.OWN_TASK)
_LEARNED = Rule(Speaker.ESTIMATOR, Subject.JOB)
_PROPOSED = Rule(Speaker.PROPOSER, Subject.JOB)
_ORDERED = Rule(Speaker.PLACER, Subject.NODE)
_UNSAID = Rule(Speaker.NOBODY, Subject.NOTHING)

RULES: Mapping[type[Event], Rule] = MappingProxyType(
    {
        external_events.JobSubmitted: _OF_JOBS,
        external_events.JobCancelRequested: _OF_JOBS,
        external_events.JobHoldRequested: _OF_JOBS,
        external_events.JobReleaseRequested: _OF_JOBS,
        external_events.JobCheckpointRequested: _OF_JOBS,
        JobCommandRun: _OF_JOBS,
        FollowerChanged: Rule(Speaker.GATEWAY, Subject.JOB),
        external_events.NodeJoined: _OF_ITSELF,
        external_events.NodeLeft: _OF_ITSELF,  # another proof than its own shutdown: an operator
        external_events.GpuFaulted: _OF_ITSELF,
        external_events.NodeChanged: _UNSAID,  # a node with another inventory joins again
        external_events.WorkProgressed: _UNSAID,  # the simulator's jobs report to no topic
        external_events.NodeCordoned: _OF_NODES,
        external_events.NodeUncordoned: _OF_NODES,
        external_events.NodeSuspected: _OF_NODES,
        external_events.ProbeSent: _OF_NODES,
        external_events.TaskStarted: _OF_ITS_TASKS,
        external_events.TaskPhaseChanged: _OF_ITS_TASKS,
        external_events.TaskCheckpointed: _OF_ITS_TASKS,
        SaveRefused: _OF_ITS_TASKS,
        external_events.CheckpointFetched: _OF_ITS_TASKS,
        external_events.StepsMeasured: _OF_ITS_TASKS,
        external_events.StagesMeasured: _OF_ITS_TASKS,
        external_events.TaskExited: _OF_ITS_TASKS,
        external_events.OrderRefused: _OF_ITS_TASKS,
        TaskAdjusted: _OF_ITS_TASKS,
        external_events.TelemetrySampled: _OF_ITSELF,
        DeadLettered: Rule(Speaker.ANY, Subject.NOTHING),
        estimates.JobEstimated: _LEARNED,
        estimates.EtaEstimated: _LEARNED,
        # no service plans measurements; the command line does, for its user
        estimates.ProfilePlanned: _UNSAID,
        estimates.StagesProfiled: _LEARNED,
        estimates.ModelTrained: Rule(Speaker.ESTIMATOR, Subject.NOTHING),
        proposals.PlanProposed: _PROPOSED,
        proposals.MigrationProposed: _PROPOSED,
        proposals.CoresProposed: _PROPOSED,
        proposals.ThrottleProposed: _PROPOSED,
        LedgerAmended: Rule(Speaker.OPERATOR, Subject.RECORD),
        orders.StartTask: _ORDERED,
        orders.StopTask: _ORDERED,
        orders.CheckpointTask: _ORDERED,
        orders.SetCores: _ORDERED,
        orders.SetBandwidth: _ORDERED,
        orders.HandOverCheckpoint: _ORDERED,
        orders.AnswerJoin: _ORDERED,
        orders.ProbeNode: _ORDERED,
        ledger_events.LedgerRecord: Rule(Speaker.PLACER, Subject.JOB),
    }
)


def speaker_of(event: Event) -> Speaker:
    """Of an event with a topic. A node tells of its own shutdown alone; other proofs that it is gone are an
    operator's."""
    if isinstance(event, external_events.NodeLeft) and event.proof != "shutdown":
        return Speaker.OPERATOR
    return RULES[type(event)].speaker


def by_operator(event: Event) -> bool:
    """Whether the gateway signs this event: an amendment, or an event about a node that does not come from
    the node itself, such as a command, a watch, a probe, an external proof."""
    return event.TOPIC is not None and speaker_of(event) is Speaker.OPERATOR
