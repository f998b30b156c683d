"""Cluster descriptions: parser of a short text, a file that lists nodes, or the nodes of a data set.

`8x8` is 8 nodes with 8 GPUs, `4x8+2x4` mixes them, `80x5x28@V100` adds cores per node and the GPU model,
`4x0x8` has no GPUs; `nodes.csv` has a line per node; `openb` is the data set's.

| file | columns that it must have | may have |
|---|---|---|
| ours | node_id, cores, host_memory_mib, gpus, gpu_model | gpu_memory_mib, rack, domain, bandwidth_mbps |
| openb's | sn, cpu_milli, memory_mib, gpu, model | |

openb counts cores in thousandths, a node here has whole ones. So its nodes, and the pods on them, count in
eighths of a core: a request is rounded to the nearest. The bound of 1,024 cores per node is the 128 cores of
its largest.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from penstock.model.nouns.nodes import Gpu, NodeSpec
from penstock.model.nouns.types import MAX_CORES_PER_NODE, MAX_GPUS_PER_NODE
from penstock.runtime.files.csv_import import BadFile, Problem, Row, header_of, rows, text_of
from penstock.simulator.traces.files.importing import data_path

MAX_NODES = 20_000
CORES_PER_GPU = 12
HOST_MEMORY_PER_GPU_MIB = 65_536
GPU_MEMORY_MIB = 32_768
UNKNOWN_GPU = "GPU"  # of GPUs whose model is not given
NODES_PER_RACK = 16
MAX_MEMORY_MIB = 1 << 30
BANDWIDTH_MBPS, MAX_BANDWIDTH_MBPS = 10_000, 10_000_000
MAX_NODE_ID_CHARS = 100  # its GPUs' ids, and its name with a rank, are longer
OPENB_SLICES_PER_CORE = 8
OPENB_NODES = "openb/openb_node_list_gpu_node.csv"  # nodes with GPUs, which the published figures are about
NODE_SETS = {"openb": OPENB_NODES}
OURS = ("node_id", "cores", "host_memory_mib", "gpus", "gpu_model")
OPENB = ("sn", "cpu_milli", "memory_mib", "gpu", "model")
PART = re.compile(
    r"([1-9][0-9]{0,5})x([1-9][0-9]?|0(?=x))(?:x([1-9][0-9]{0,4}))?(?:@([A-Za-z][A-Za-z0-9._-]{0,39}))?"
)


class BadCluster(ValueError):
    """Not a valid cluster; the message names the valid forms."""


class Cluster(NamedTuple):
    """Nodes, and their units per core."""

    nodes: tuple[NodeSpec, ...]
    slices_per_core: int = 1
    ranked: bool = False
    """Whether the seed permutes the nodes' ranks: the source breaks ties by one permutation per run."""

    def under(self, seed: int) -> tuple[NodeSpec, ...]:
        """The nodes under this seed: if ranked, in a seeded order and named after their rank."""
        if not self.ranked:
            return self.nodes
        order = np.random.default_rng(seed).permutation(len(self.nodes)).tolist()
        return tuple(
            msgspec.structs.replace(self.nodes[index], node_id=f"{rank:05}.{self.nodes[index].node_id}")
            for rank, index in enumerate(order)
        )


def cluster_of(text: str) -> Cluster:
    """The cluster of a text such as `8x8`, a path, or the name of a data set. Raises `BadCluster`, and
    `BadFile` for a file's content."""
    if text in NODE_SETS and not Path(text).is_file():
        return read_nodes(data_path(NODE_SETS[text], f"cluster {text}", text))
    path = Path(text)
    if path.suffix == ".csv" or path.is_file():
        return read_nodes(path)
    return Cluster(nodes_of(text))


def nodes_of(text: str) -> tuple[NodeSpec, ...]:
    """The nodes, `n00000` first. Raises `BadCluster`.

    Memory, and cores where the text has none, are so plentiful that only GPUs limit: most traces do not have
    them.
    """
    found: list[NodeSpec] = []
    for part in text.split("+"):
        match = PART.fullmatch(part.strip())
        if match is None:
            raise BadCluster(
                f"cluster {text!r}: {part!r} is not <nodes>x<GPUs per node>, as in 8x8 or 4x8+2x4, "
                "nor <nodes>x<GPUs>x<cores>@<GPU model>, and no CSV file of nodes"
            )
        nodes, gpus = int(match[1]), int(match[2])
        cores = int(match[3]) if match[3] else CORES_PER_GPU * gpus
        if gpus > MAX_GPUS_PER_NODE:
            raise BadCluster(f"cluster {text!r}: a node has at most {MAX_GPUS_PER_NODE} GPUs")
        if cores > MAX_CORES_PER_NODE:
            raise BadCluster(f"cluster {text!r}: a node has at most {MAX_CORES_PER_NODE} cores")
        if len(found) + nodes > MAX_NODES:
            raise BadCluster(f"cluster {text!r}: at most {MAX_NODES} nodes can be simulated")
        memory_mib = HOST_MEMORY_PER_GPU_MIB * max(1, gpus)
        model = match[4] or UNKNOWN_GPU
        found += [
            _node(f"n{index:05}", cores, memory_mib, gpus, model, rack=_rack(index))
            for index in range(len(found), len(found) + nodes)
        ]
    return tuple(found)


def read_nodes(path: Path) -> Cluster:
    """Nodes from a file. Raises `BadFile` with all problems."""
    text = text_of(path)
    columns = header_of(path, text)
    openb = frozenset(columns).issuperset(OPENB)
    missing = [] if openb else sorted(set(OURS) - set(columns))
    if missing:
        raise BadFile(str(path), [Problem(1, column, "missing (a list of nodes)") for column in missing])
    problems: list[Problem] = []
    nodes: dict[str, NodeSpec] = {}
    lines: dict[str, int] = {}
    for line, values in rows(text, columns, _openb_node if openb else _our_node, problems):
        node = _node(**values)
        if node.node_id in nodes:
            message = f"node {node.node_id} stands already in line {lines[node.node_id]}"
            problems.append(Problem(line, "", message))
        nodes.setdefault(node.node_id, node)
        lines.setdefault(node.node_id, line)
    if len(nodes) > MAX_NODES:
        problems.append(Problem(0, "", f"{len(nodes)} nodes; at most {MAX_NODES} can be simulated"))
    if not any(node.gpus for node in nodes.values()) and not problems:
        problems.append(Problem(0, "", "no node with a GPU in it" if nodes else "no node in it"))
    if problems:
        raise BadFile(str(path), sorted(problems, key=lambda problem: problem.line))
    found = tuple(nodes.values())
    return Cluster(found, OPENB_SLICES_PER_CORE, ranked=True) if openb else Cluster(found)


def _our_node(row: Row) -> dict[str, Any]:
    """Arguments of `_node`."""
    gpus = row.whole("gpus", most=MAX_GPUS_PER_NODE)
    found: dict[str, Any] = {
        "name": row.name("node_id", most=MAX_NODE_ID_CHARS),
        "cores": row.whole("cores", least=1, most=MAX_CORES_PER_NODE),
        "host_memory_mib": row.whole("host_memory_mib", least=1, most=MAX_MEMORY_MIB),
        "gpus": gpus,
        "model": row.name("gpu_model", optional=not gpus),
        "rack": row.name("rack") if row.has("rack") else _rack(row.line - 2),
    }
    if row.has("domain"):
        found["domain"] = row.name("domain")
    for column, most in (("gpu_memory_mib", MAX_MEMORY_MIB), ("bandwidth_mbps", MAX_BANDWIDTH_MBPS)):
        if row.has(column):
            found[column] = row.whole(column, least=1, most=most)
    return found


def _openb_node(row: Row) -> dict[str, Any]:
    """Arguments of `_node`. The source has no racks and no GPU memory: 16 nodes a rack,
    and memory enough for all."""
    gpus = row.whole("gpu", most=MAX_GPUS_PER_NODE)
    most_milli = MAX_CORES_PER_NODE * 1_000 // OPENB_SLICES_PER_CORE
    milli = row.whole("cpu_milli", least=1_000 // OPENB_SLICES_PER_CORE, most=most_milli)
    return {
        "name": row.name("sn", most=MAX_NODE_ID_CHARS),
        "cores": milli * OPENB_SLICES_PER_CORE // 1_000,
        "host_memory_mib": row.whole("memory_mib", least=1, most=MAX_MEMORY_MIB),
        "gpus": gpus,
        "model": row.name("model", optional=not gpus),
        "rack": _rack(row.line - 2),
    }


def _rack(index: int) -> str:
    return f"rack-{index // NODES_PER_RACK}"


def _node(
    name: str,
    cores: int,
    host_memory_mib: int,
    gpus: int,
    model: str,
    rack: str,
    gpu_memory_mib: int = GPU_MEMORY_MIB,
    domain: str = "domain-0",
    bandwidth_mbps: int = BANDWIDTH_MBPS,
) -> NodeSpec:
    return NodeSpec(
        node_id=name,
        boot_id="b1",
        rack=rack,
        domain=domain,
        cores=cores,
        host_memory_mib=host_memory_mib,
        bandwidth_mbps=bandwidth_mbps,
        gpus=tuple(
            Gpu(index=gpu, uuid=f"GPU-{name}-{gpu}", model=model, memory_mib=gpu_memory_mib)
            for gpu in range(gpus)
        ),
    )


def gpu_count(nodes: Sequence[NodeSpec]) -> int:
    """GPUs of all nodes together."""
    return sum(len(node.gpus) for node in nodes)
