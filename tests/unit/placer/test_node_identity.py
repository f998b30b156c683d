"""Who speaks for a node: its own key, from its first joining on; no other writer's record and no old one has
any effect."""

import base64
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
from msgspec.structs import replace

from penstock.errors import ConfigurationError
from penstock.ledger.check.check import check
from penstock.ledger.record.record import Head, read, write
from penstock.ledger.state.state import CellState
from penstock.model.decisions.ledger_events import NodeJoinRefused, TermStarted
from penstock.model.decisions.orders import AnswerJoin
from penstock.model.inputs.estimates import JobEstimated
from penstock.model.inputs.external_events import (
    GpuFaulted,
    JobSubmitted,
    NodeCordoned,
    NodeLeft,
    NodeUncordoned,
    RunningTask,
    TaskStarted,
)
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.schema.event import Event
from penstock.model.schema.topics import Topic
from penstock.model.wire.envelope import SIGNATURE, Envelope, Headers, to_wire, topic_of
from penstock.runtime.keys.node_keys import (
    CODE,
    OPERATOR_KEY,
    PLACER_KEY,
    NodeKeys,
    PlacerKeys,
    key_file_at,
    operator_key,
)
from penstock.runtime.keys.signatures import ExchangeKey, SigningKey, verify
from penstock_services.node_reporter.core.inputs import OrderRead
from penstock_services.node_reporter.core.joining import Fence
from penstock_services.node_reporter.core.machine import step
from penstock_services.node_reporter.core.state import NodeState
from penstock_services.placer.core.answer import (
    Answer,
    Forgery,
    Input,
    Moment,
    answer_input,
    answer_term,
    forgery_of,
)
from penstock_services.placer.core.orders import orders_of
from penstock_services.placer.core.step import PlacerCore
from penstock_services.placer.shell.identity import Identity
from tests.support.cluster.driver import estimate, job_spec
from tests.support.node_reporter.forgeries import (
    ACTS,
    CELL,
    FORGERIES,
    GATEWAYS,
    KEY,
    OTHER,
    WORKER,
    exited,
    joined,
    proofs,
    signature,
    unmoved,
)


class SignedCell:
    """A placer that reads records, as its shell hands them over: n1 signs with KEY, n2 never named a key."""

    def __init__(self) -> None:
        self.core = PlacerCore(CellState())
        self.seq, self.term, self.offsets = 1, 1, dict.fromkeys(Topic, 0)
        answer_term(
            self.core, Moment(1, 1, 1_000), TermStarted(term=1, placer_id="p", settings=PlacerSettings())
        )
        self.identity = Identity(CELL, PlacerKeys(b"p" * 32), GATEWAYS)

    @property
    def state(self) -> CellState:
        return self.core.state

    def read(
        self, event: Event, key: NodeKeys | bytes | None = None, *, topic: Topic | None = None, **more: str
    ) -> Answer:
        self.seq += 1
        envelope = Envelope(f"e{self.seq}", "/t", 1, event)
        headers, value = to_wire(envelope)
        if key is not None:
            headers = (*headers, *proofs(key, envelope, value, **more))
        return self.take(topic or topic_of(event), headers, value)

    def take(self, topic: Topic, headers: Headers, value: bytes) -> Answer:
        self.seq += 1
        self.offsets[topic] += 1
        found = Input(topic, 0, self.offsets[topic], headers, value)
        answer = answer_input(
            self.core, Moment(self.seq, self.term, 2_000), found, None, self.identity.forged
        )
        assert check(self.state) == []
        return answer

    @property
    def token(self) -> int:
        return self.state.jobs["j"].token


@pytest.fixture
def cell() -> SignedCell:
    found = SignedCell()
    assert found.read(joined("n1", KEY), KEY).draft.outcome == "committed"
    found.read(JobSubmitted(job_id="j", spec=job_spec()))
    found.read(JobEstimated(job_id="j", estimate=estimate(4)))
    assert found.state.jobs["j"].tasks[WORKER].place.node_id == "n1"
    started = TaskStarted(node_id="n1", task_id=WORKER, token=found.token, pid=1, started_ms=1)
    assert found.read(started, KEY).draft.outcome == "committed"
    return found


@pytest.mark.parametrize("name", FORGERIES)
@pytest.mark.parametrize("signer", ["no key", "another key", "of another cell"])
def test_nobody_else_speaks_for_a_node(cell: SignedCell, name: str, signer: str) -> None:
    """Another reporter, with the same rights on the topic, reports that a task has ended whose GPUs it
    wants."""
    event = FORGERIES[name](cell.token)
    before = unmoved(cell.state)
    if signer == "of another cell":
        answer = cell.read(event, KEY, cell="other")
    else:
        answer = cell.read(event, OTHER if signer == "another key" else None)
    assert answer.draft.outcome == "dead_lettered"
    assert answer.draft.facts == ()
    assert answer.letter is not None
    assert answer.letter[0] == "forged"
    assert "n1" in answer.letter[1]
    assert unmoved(cell.state) == before


def test_a_signature_covers_every_byte(cell: SignedCell) -> None:
    """The reporter of n1 is honest; a thief copies its record and changes its text."""
    envelope = Envelope("x", "/t", 1, exited(cell.token - 1))
    headers, value = to_wire(envelope)
    signed = (*headers, *signature(KEY, envelope, value))
    changed = value.replace(b'"token":%d' % (cell.token - 1), b'"token":%d' % cell.token)
    assert changed != value
    assert cell.take(Topic.NODES, signed, changed).letter is not None
    renamed = tuple((name, b"y" if name == "ce_id" else raw) for name, raw in signed)
    assert cell.take(Topic.NODES, renamed, value).letter is not None
    for damaged in (b"", b"!", b"QUJD", dict(signature(KEY, envelope, value))[SIGNATURE][:-4]):
        assert cell.take(Topic.NODES, (*headers, (SIGNATURE, damaged)), value).letter is not None
    assert cell.state.jobs["j"].tasks[WORKER].status == "running"
    answer = cell.read(exited(cell.token), KEY)
    assert answer.draft.outcome == "committed"
    assert cell.state.ended["j"] == "succeeded"


def test_an_old_record_sent_again_has_no_effect(cell: SignedCell) -> None:
    """A reader of the topic sends all of a node's own records again, in a later term."""
    n1 = cell.state.nodes["n1"]
    sent = [
        joined("n1", KEY),
        TaskStarted(node_id="n1", task_id=WORKER, token=cell.token, pid=1, started_ms=1),
    ]
    sent += [GpuFaulted(node_id="n1", gpu=3, uuid="GPU-n1-3", fault="ecc", incarnation=1), exited(cell.token)]
    for event in sent[2:]:
        assert cell.read(event, KEY).draft.outcome == "committed"
    left = NodeLeft(node_id="n1", boot_id="b1", proof="shutdown", incarnation=1)
    cell.read(JobSubmitted(job_id="k", spec=job_spec()))
    assert cell.read(joined("n1", KEY, 2), KEY).draft.outcome == "committed"  # repaired
    assert n1.faulted_gpu_mask == 0
    cell.term = 2
    cell.read(JobSubmitted(job_id="l", spec=job_spec()))
    before = unmoved(cell.state)
    for event in (*sent, left):
        answer = cell.read(event, KEY)
        assert [type(fact) for fact in answer.draft.facts] in ([], [NodeJoinRefused]), event
    assert unmoved(cell.state) == before


def test_only_the_gateway_speaks_for_operators(cell: SignedCell, tmp_path: Path) -> None:
    """A reporter may write to the nodes' topic; it fences, cordons and suspects no node there, not even its
    own."""
    before = unmoved(cell.state)
    for act in ACTS:
        for key in (None, KEY, b"another key of thirty-two bytes!"):
            assert cell.read(act, key).letter is not None
    assert unmoved(cell.state) == before
    assert [cell.read(act, GATEWAYS).draft.outcome for act in ACTS[1:4]] == ["committed"] * 3
    letter = cell.read(ACTS[1]).letter
    assert letter is not None
    assert "PENSTOCK_OPERATOR_KEY" in letter[1]


def test_an_operators_old_fence_ends_no_later_joining(cell: SignedCell) -> None:
    """A node was cut off, fenced and is back without a boot; a thief of the topic sends the operator's signed
    record again."""
    fence = NodeLeft(
        node_id="n1", boot_id="b1", proof="fenced", incarnation=1, by="ops/on-call", reason="cut"
    )
    assert cell.read(fence, GATEWAYS).draft.outcome == "committed"
    assert cell.read(joined("n1", KEY, 2), KEY).draft.outcome == "committed"
    assert cell.read(fence, GATEWAYS).draft.reason == "stale_leave"
    assert cell.state.nodes["n1"].status == "ready"


def test_an_operators_old_command_is_not_obeyed_again(cell: SignedCell) -> None:
    """Fans were replaced last week. A thief of the topic sends the operator's signed drain again, and later
    its end."""

    def act(kind: type[NodeCordoned | NodeUncordoned], **more: bool) -> NodeCordoned | NodeUncordoned:
        return kind(node_id="n1", by="ops/on-call", reason="fans", after=cell.state.seq, **more)

    drain = act(NodeCordoned, drain=True)
    assert cell.read(drain, GATEWAYS).draft.outcome == "committed"
    end = act(NodeUncordoned)
    assert cell.read(end, GATEWAYS).draft.outcome == "committed"
    before = unmoved(cell.state)
    assert cell.read(drain, GATEWAYS).draft.reason == "stale_command"
    assert unmoved(cell.state) == before
    assert cell.read(act(NodeCordoned), GATEWAYS).draft.outcome == "committed"
    assert cell.read(end, GATEWAYS).draft.reason == "stale_command"
    assert cell.read(joined("n3", OTHER), OTHER).draft.outcome == "committed"
    early = replace(drain, node_id="n3")
    assert cell.read(early, GATEWAYS).draft.reason == "stale_command", (
        "of a node of that name that was forgotten"
    )


def test_without_a_key_a_cell_must_trust_its_log_explicitly(cell: SignedCell, tmp_path: Path) -> None:
    """A placer is started by hand, and its operator never read of keys: each writer of the nodes' topic could
    fence."""
    with pytest.raises(ConfigurationError, match=r"PENSTOCK_OPERATOR_KEY: not set.*trust-log"):
        operator_key({})
    assert operator_key({"PENSTOCK_OPERATOR_KEY": "trust-log"}) is None
    cell.identity = Identity(CELL, PlacerKeys(b"p" * 32), None)
    assert cell.read(ACTS[1]).draft.outcome == "committed"

    path = tmp_path / "operator.key"
    path.write_bytes(GATEWAYS)
    path.chmod(0o644)
    with pytest.raises(ConfigurationError, match="0644"):
        operator_key({"PENSTOCK_OPERATOR_KEY": str(path)})
    path.chmod(0o600)
    assert operator_key({"PENSTOCK_OPERATOR_KEY": str(path)}) == GATEWAYS
    with pytest.raises(ConfigurationError, match="is missing; make one"):
        operator_key({"PENSTOCK_OPERATOR_KEY": str(tmp_path / "none")})


def test_a_name_is_bound_to_its_first_key(cell: SignedCell) -> None:
    """A machine that lost its key, or another one, joins: an operator first fences the former."""
    again = joined("n1", OTHER, 5, tasks=(RunningTask(task_id=WORKER, token=cell.token),))
    answer = cell.read(again, OTHER)
    assert answer.letter is not None
    assert "penstock node fence n1" in answer.letter[1]
    [fact] = answer.draft.facts
    assert isinstance(fact, NodeJoinRefused), "that machine is to know"
    assert (fact.reason, fact.incarnation, fact.public_key) == ("other_machine", 5, OTHER.public_key)
    [order] = orders_of(cell.state, fact, cell.seq)
    assert isinstance(order, AnswerJoin)
    n1 = NodeState("n1", "b1", (), incarnation=5, public_key=KEY.public_key)
    assert step(n1, OrderRead(order, 1)) == [], "the node itself, had it this very incarnation, goes on"
    n1.public_key = OTHER.public_key
    assert [type(decision) for decision in step(n1, OrderRead(order, 1))] == [Fence]
    forgery = forgery_of(read(write(Head(cell.seq - 1, "0" * 32, 1), answer.draft)[1]))
    assert forgery == Forgery(answer.letter[1].removeprefix("forged: "), answer.draft.facts)
    assert cell.read(again, KEY).draft.facts == (), "a joining under a key that has not signed it"
    assert cell.read(joined("n1", None, 6)).letter is not None
    assert cell.read(joined("n1", KEY, 7), KEY).draft.outcome == "committed"

    cell.read(NodeLeft(node_id="n1", boot_id="b1", proof="fenced", by="ada", reason="burnt"), GATEWAYS)
    assert cell.read(exited(cell.token), None).letter is not None, "until then it is the former one's"
    assert cell.read(joined("n1", OTHER, 8), OTHER).draft.outcome == "committed"
    fault = GpuFaulted(node_id="n1", gpu=0, uuid="GPU-n1-0", fault="ecc")
    assert cell.read(fault, KEY).letter is not None
    assert cell.read(fault, OTHER).draft.outcome == "committed"


def test_a_reporter_of_before_goes_on_until_it_signs(cell: SignedCell) -> None:
    """A rolling upgrade: the placer first, then one node after another."""
    assert cell.read(joined("n2", None)).draft.outcome == "committed"
    fault = GpuFaulted(node_id="n2", gpu=0, uuid="GPU-n2-0", fault="ecc")
    assert cell.read(fault).draft.outcome == "committed"
    assert cell.read(joined("n2", OTHER, 2)).letter is not None, "a key must sign what names it"
    assert cell.read(joined("n2", OTHER, 2), OTHER).draft.outcome == "committed"
    assert cell.read(fault).letter is not None


def test_the_code_stands_for_the_signature_between_the_two_who_agreed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Node and placer share a secret since the first order; a placer that has just started has the
    signature."""
    node, placer, next_placer = NodeKeys(b"a" * 32), PlacerKeys(b"p" * 32), PlacerKeys(b"q" * 32)
    assert [name for name, _ in node.proofs(b"x")] == [SIGNATURE]
    node.meet((placer.header,))
    proofs = node.proofs(b"x")
    assert [name for name, _ in proofs] == [SIGNATURE, CODE]
    assert next_placer.proven(node.public_key, proofs, b"x")
    stranger = NodeKeys(b"b" * 32)
    stranger.meet((placer.header,))
    for keys in (placer, next_placer):
        assert not keys.proven(node.public_key, proofs, b"y")
        assert not keys.proven(node.public_key, stranger.proofs(b"x"), b"x")
        assert not keys.proven(node.public_key, ((CODE, dict(proofs)[CODE][:9]),), b"x")
    monkeypatch.setattr("penstock.runtime.keys.node_keys.verify", lambda *_: pytest.fail("the code suffices"))
    assert placer.proven(node.public_key, proofs, b"x")
    node.meet(((PLACER_KEY, b"\xff"),))
    assert [name for name, _ in node.proofs(b"x")] == [SIGNATURE], "what is not a key is not agreed upon"


def test_x25519_as_the_standard_has_it() -> None:
    """RFC 7748 §6.1: Bob's keys. A public key of small order gives no secret."""
    alice = ExchangeKey(bytes.fromhex("77076d0a7318a57d3c16c17251b26645c6eb82dcc6c1a8b9e8f4dd3b3c5e0d0a"))
    bob = ExchangeKey(bytes.fromhex("5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb"))
    assert base64.urlsafe_b64decode(bob.public_key + "=").hex() == (
        "de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f"
    )
    assert alice.shared(bob.public_key) is not None
    assert alice.shared(bob.public_key) == bob.shared(alice.public_key)
    assert alice.shared(base64.urlsafe_b64encode(bytes(32)).rstrip(b"=").decode()) is None


def test_ed25519_as_the_standard_has_it() -> None:
    """RFC 8032 §7.1, test 2: any other implementation agrees."""
    key = SigningKey(bytes.fromhex("4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb"))
    assert key.public_key == "PUAXw-hDiVqStwqnTRt-vJyYLM8uxJaMwM1V8Sr0Zgw"
    signed = key.sign(b"\x72")
    assert (
        base64.b64decode(signed)
        .hex()
        .startswith("92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da")
    )
    assert verify(key.public_key, signed, b"\x72")
    assert not verify(key.public_key, signed, b"\x73")
    assert not verify("x" * 43, signed, b"\x72")
    with pytest.raises(ValueError, match="32 bytes"):
        SigningKey(b"short")


def test_services_that_start_at_once_share_one_key(tmp_path: Path) -> None:
    """Gateway, placer and nodes of a new installation ask for the operator's key at the same moment."""
    at_once = Barrier(4)

    def start(path: Path) -> bytes | None:
        at_once.wait()
        return operator_key({OPERATOR_KEY: str(key_file_at(path))})

    with ThreadPoolExecutor(4) as pool:
        for number in range(100):
            folder = tmp_path / str(number)
            folder.mkdir()
            assert len(set(pool.map(start, [folder / "operator.key"] * 4))) == 1
            assert [file.name for file in folder.iterdir()] == ["operator.key"]
