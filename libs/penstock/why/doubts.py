"""Texts about nodes and jobs that are held up: silence, doubt, distrust, cordons, holds."""

from collections.abc import Mapping

from penstock.ledger.state.holds import Cordon, Hold
from penstock.ledger.state.index import bits
from penstock.ledger.state.lease import lease_of
from penstock.ledger.state.node.node_state import NodeState
from penstock.ledger.state.state import CellState
from penstock.ledger.views import doubt
from penstock.model.nouns.transitions import TaskStatus


def silence_text(row: Mapping[str, str]) -> str:
    """`n1 is silent: whether w0 still runs there is not proven`."""
    name = row["task_id"].rpartition(".")[2]
    doubt = "was started" if row["task"] == TaskStatus.ASSIGNED else "still runs"
    return f"{row['node_id']} is silent: whether {name} {doubt} there is not proven"


def doubt_text(state: CellState, node_id: str, now_ms: int) -> str:
    """` Why n1 is suspect: its connection broke; probed; unless it answers, its tasks are proven dead in 80
    s.`

    Empty where the node is not suspect.
    """
    node = state.nodes[node_id]
    found = doubt(state, node)
    if found is None:
        return ""
    if found["proven_ms"] is not None:
        left_s = max(0, found["proven_ms"] - now_ms) // 1_000
        until = f"probed; unless it answers, its tasks are proven dead in {left_s} s"
    else:
        until = "no lease proves its end" if lease_of(node, state) is None else "its probe is under way"
    return f" Why {node_id} is suspect: {found['reason']}; {until}."


def distrust_text(node: NodeState, now_ms: int) -> str:
    """`n1: 3 jobs of 3 owners failed there …; a probe starts there in 40 s`; empty: the node is trusted."""
    found = node.distrust
    if found is None:
        return ""
    gpus = f" GPU {', '.join(map(str, bits(found.gpu_mask)))}" if found.gpu_mask else ""
    probe = f"a probe starts there in {max(0, found.until_ms - now_ms) // 1_000} s"
    if found.probe or found.open:
        probe = f"its probe is {found.probe}" if found.probe else "the next job there is its probe"
    return f"{node.spec.node_id}{gpus}: {found.reason}; {probe}"


def cordon_text(cordon: Cordon) -> str:
    """`is being drained by ada: fans are to be replaced`."""
    what = "is being drained" if cordon.drain else "is cordoned"
    return f"{what} by {cordon.by}" + (f": {cordon.reason}" if cordon.reason else "")


def hold_text(hold: Hold) -> str:
    """`by ada: the data are being copied`."""
    who = "an operator" if hold.by_operator else "its tenant"
    return f"by {hold.by or who}" + (f": {hold.reason}" if hold.reason else "")
