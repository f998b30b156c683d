"""Clusters to simulate on, from a short text: `8x8` is 8 nodes with 8 GPUs, `4x8+2x4` mixes them."""

import re

from penstock.cluster.nouns import MAX_GPUS_PER_NODE, Gpu, NodeSpec

MAX_NODES = 20_000
CORES_PER_GPU = 12
HOST_MEMORY_PER_GPU_MIB = 65_536
GPU_MEMORY_MIB = 32_768
NODES_PER_RACK = 16
PART = re.compile(r"([1-9][0-9]{0,5})x([1-9][0-9]?)")


class BadCluster(ValueError):
    """The text describes no cluster; the message says what would."""


def nodes_of(text: str) -> tuple[NodeSpec, ...]:
    """The nodes, `n00000` first. Raises `BadCluster`.

    Cores and memory are so plenty that only GPUs bind: traces say nothing about them.
    """
    sizes: list[int] = []
    for part in text.split("+"):
        match = PART.fullmatch(part.strip())
        if match is None:
            raise BadCluster(
                f"cluster {text!r}: {part!r} is not <nodes>x<GPUs per node>, as in 8x8 or 4x8+2x4"
            )
        nodes, gpus = int(match[1]), int(match[2])
        if gpus > MAX_GPUS_PER_NODE:
            raise BadCluster(f"cluster {text!r}: a node has at most {MAX_GPUS_PER_NODE} GPUs")
        if len(sizes) + nodes > MAX_NODES:
            raise BadCluster(f"cluster {text!r}: at most {MAX_NODES} nodes can be simulated")
        sizes += [gpus] * nodes
    return tuple(_node(index, gpus) for index, gpus in enumerate(sizes))


def _node(index: int, gpus: int) -> NodeSpec:
    name = f"n{index:05}"
    return NodeSpec(
        node_id=name,
        boot_id="b1",
        rack=f"rack-{index // NODES_PER_RACK}",
        cores=CORES_PER_GPU * gpus,
        host_memory_mib=HOST_MEMORY_PER_GPU_MIB * gpus,
        gpus=tuple(
            Gpu(index=gpu, uuid=f"GPU-{name}-{gpu}", model="GPU", memory_mib=GPU_MEMORY_MIB)
            for gpu in range(gpus)
        ),
    )
