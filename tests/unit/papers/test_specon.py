"""SpeCon's choice of a host (Alg. 2) and its rebalancing (Alg. 3), by hand, and in a cell."""

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from penstock.scheduling.acting.convergence import Category
from penstock_papers.specon import Host, host_for, rebalanced

P, W, C = Category.PROGRESSING, Category.WATCHING, Category.CONVERGED


def host(name: str, categories: str, consumption: float = 0.0) -> Host:
    """`categories`: a letter for each job: p, w, c. Job ids are the node's and a number."""
    kinds = {"p": P, "w": W, "c": C}
    return Host(name, {f"{name}-{i}": kinds[letter] for i, letter in enumerate(categories)}, consumption)


def test_the_lowest_score_takes_it() -> None:
    """The example of Fig. 9's kind: scores 4.5, 7, 3 — the third node has most jobs, and all have
    converged."""
    hosts = [host("w1", "pwc"), host("w2", "pppc"), host("w3", "ccc")]
    assert [one.score for one in hosts] == [4.5, 7.0, 3.0]
    assert host_for("w2", hosts) == "w3"


def test_it_stays_where_no_node_is_better() -> None:
    """Its own node is among those with the lowest score (lines 8–10), also where others have the same."""
    assert host_for("w1", [host("w1", "pc"), host("w2", "wwc")]) == "w1"
    assert host_for("w2", [host("w1", "cc", 0.1), host("w2", "cc", 0.9)]) == "w2"


def test_of_equal_scores_the_node_that_uses_least() -> None:
    """Lines 17–21; of equal ones the first."""
    hosts = [host("w1", "ppp"), host("w2", "c", 0.5), host("w3", "c", 0.25), host("w4", "c", 0.25)]
    assert host_for("w1", hosts) == "w3"


def test_idle_nodes_get_the_jobs_that_converged_last() -> None:
    """Four jobs on two nodes, two nodes idle, bf = 1: each gets one, the latest judged first (lines
    10–16)."""
    hosts = [host("w1", "cc"), host("w2", "cc"), host("w3", ""), host("w4", "")]
    judged = {"w1-0": 10, "w1-1": 40, "w2-0": 30, "w2-1": 20}
    assert rebalanced(hosts, judged) == [("w1-1", "w3"), ("w2-0", "w4")]
    assert rebalanced([host("w1", "c"), host("w2", ""), host("w3", "")], {"w1-0": 1}) == [], "bf is 0"


def test_without_an_idle_node_one_job_goes_to_one_that_lacks_two() -> None:
    """Seven jobs on two nodes, bf = 3: w2 has fewer than bf − 1 (lines 19–29)."""
    hosts = [host("w1", "cccccc"), host("w2", "c")]
    judged = {job_id: number for one in hosts for number, job_id in enumerate(one.jobs)} | {"w2-0": 99}
    assert rebalanced(hosts, judged) == [("w1-5", "w2")]
    assert rebalanced([host("w1", "ccc"), host("w2", "cc")], {"w1-0": 1}) == [], "nobody lacks two"
    assert rebalanced([], {}) == []


loads = st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 8), min_size=1)


@given(loads)
def test_rebalancing_never_moves_to_where_the_job_is(found: Mapping[str, int]) -> None:
    """Whatever runs where: a job goes to another node, none goes twice, and a target had fewer jobs than
    bf."""
    hosts = [host(name, "c" * load) for name, load in sorted(found.items())]
    judged = {job_id: number for one in hosts for number, job_id in enumerate(one.jobs)}
    moves = rebalanced(hosts, judged)
    factor = sum(found.values()) // len(found)
    assert len({job_id for job_id, _ in moves}) == len(moves)
    for job_id, target in moves:
        assert not job_id.startswith(f"{target}-")
        assert found[target] < factor
    assert rebalanced(hosts, judged) == moves


@given(loads, st.sampled_from("abcdef"))
def test_a_host_has_the_lowest_score(found: Mapping[str, int], current: str) -> None:
    """Never a node with a higher score than its own."""
    hosts = [host(name, "w" * load) for name, load in sorted({**found, current: 3}.items())]
    scores = {one.node_id: one.score for one in hosts}
    assert scores[host_for(current, hosts)] == min(scores.values())
