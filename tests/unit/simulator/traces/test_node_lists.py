"""Clusters from files: a line per node."""

from pathlib import Path

import pytest

from penstock.cli.app import run as main
from penstock.runtime.files.csv_import import BadFile
from penstock.simulator.traces.cluster import OPENB_SLICES_PER_CORE, BadCluster, cluster_of, gpu_count

HEADER = "node_id,cores,host_memory_mib,gpus,gpu_model\n"


@pytest.fixture
def nodes(tmp_path: Path) -> Path:
    return tmp_path / "nodes.csv"


def problems(path: Path, text: str) -> list[str]:
    path.write_text(text)
    with pytest.raises(BadFile) as caught:
        cluster_of(str(path))
    return [str(problem) for problem in caught.value.problems]


def test_a_list_of_the_users_own_nodes(nodes: Path) -> None:
    """Two GPU nodes of different make and one with cores only, in racks that matter."""
    nodes.write_text(
        "node_id,rack,cores,host_memory_mib,gpus,gpu_model,gpu_memory_mib,bandwidth_mbps\n"
        "a1,r1,64,500000,8,A100,40960,100000\nt1,r1,32,120000,4,T4,,\nc1,,96,500000,0,,,\n"
    )
    cluster = cluster_of(str(nodes))
    assert (gpu_count(cluster.nodes), cluster.slices_per_core, cluster.under(7)) == (12, 1, cluster.nodes)
    a1, t1, c1 = cluster.nodes
    assert (a1.cores, a1.host_memory_mib, a1.rack, a1.gpus[7].model, a1.gpus[7].memory_mib) == (
        64,
        500_000,
        "r1",
        "A100",
        40_960,
    )
    assert (a1.bandwidth_mbps, t1.bandwidth_mbps) == (100_000, 10_000)
    assert [gpu.model for gpu in t1.gpus] == ["T4"] * 4
    assert (c1.gpus, c1.rack) == ((), "rack-0")


def test_openb_counts_eighths_of_cores_and_ranks_nodes_by_seed(nodes: Path) -> None:
    """Its pods ask for thousandths of cores: whole cores would waste a tenth. Ties go by a random rank per
    run."""
    nodes.write_text(
        "sn,cpu_milli,memory_mib,gpu,model\nn0,64000,262144,2,P100\n"
        "n1,128000,786432,8,G3\nn2,96000,393216,0,\n"
    )
    cluster = cluster_of(str(nodes))
    assert [node.cores // OPENB_SLICES_PER_CORE for node in cluster.nodes] == [64, 128, 96]
    first, second = cluster.under(1), cluster.under(2)
    assert [node.node_id for node in first] == sorted(node.node_id for node in first)
    assert {node.node_id.partition(".")[2] for node in first} == {"n0", "n1", "n2"}
    assert cluster.under(1) == first
    assert any(cluster.under(seed) != second for seed in range(3, 9))


def test_lists_that_describe_no_cluster(nodes: Path) -> None:
    """All problems of a list, with line and column; a name that is neither a list nor `8x8`."""
    text = HEADER + "a,8,1000,2,T4\na,8,1000,2,T4\nb,0,-1,17,\nc,2000,10,1,\nd,8,10,0,\n"
    assert problems(nodes, text) == [
        "line 3: node a stands already in line 2",
        "line 4, column gpus: 17 is more than 16",
        "line 4, column cores: 0 is less than 1",
        "line 4, column host_memory_mib: '-1' is not a whole number ≥ 1",
        "line 5, column cores: 2000 is more than 1024",
        "line 5, column gpu_model: '' is not a name of letters, digits and . _ : / -",
    ]
    long = "n" * 101
    problem = f"line 2, column node_id: {long[:40]!r} …: 101 characters, at most 100"
    assert problems(nodes, HEADER + f"{long},8,10,1,T4\n") == [problem]
    assert problems(nodes, HEADER) == ["file: no node in it"]
    assert problems(nodes, HEADER + "d,8,10,0,\n") == ["file: no node with a GPU in it"]
    assert problems(nodes, "node_id,cores\nd,8\n") == [
        f"line 1, column {column}: missing (a list of nodes)"
        for column in ("gpu_model", "gpus", "host_memory_mib")
    ]
    assert problems(nodes, "sn,cpu_milli,memory_mib,gpu,model\na,128001,1,1,G\nb,124,1,1,G\n") == [
        "line 2, column cpu_milli: 128001 is more than 128000",
        "line 3, column cpu_milli: 124 is less than 125",
    ]
    with pytest.raises(BadCluster, match="and no CSV file of nodes"):
        cluster_of("my-nodes")
    with pytest.raises(BadFile, match="No such file"):
        cluster_of("gone.csv")


def test_a_trace_of_shares_runs_on_a_list_of_nodes(
    nodes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half GPUs and quarter cores on a node of one GPU; a pod whose GPU type no node has is reported."""
    nodes.write_text(HEADER + "a,8,64000,1,T4\n")
    trace = tmp_path / "trace.csv"
    header = "job_id,submit_s,duration_s,gpus,gpu_share_milli,cores,gpu_models\n"
    trace.write_text(header + "x,0,60,1,500,2.5,T4\ny,0,60,1,500,2.5,T4|P100\n")
    assert main(["simulate", str(trace), "--cluster", str(nodes), "-o", "json", "--check"]) == 0
    assert '"makespan_s": 60.0' in capsys.readouterr().out, "both at once, on one GPU"
    trace.write_text(header + "x,0,60,1,500,2.5,V100\n")
    assert main(["simulate", str(trace), "--cluster", str(nodes)]) == 2
    assert "line 2, column gpu_models: no node has V100; there are T4" in capsys.readouterr().err
