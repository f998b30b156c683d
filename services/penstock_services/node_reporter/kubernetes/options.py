"""Command-line options of the node-reporter of a Kubernetes cluster."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from penstock_services.node_reporter.kubernetes.core.state import Options


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """One cluster."""

    cluster: Annotated[
        str,
        typer.Option(metavar="NAME", help="Name of the cluster, unique in the cell; nodes are NAME/NODE."),
    ]
    backend: Annotated[
        Literal["kubernetes"], typer.Option(help="`kubernetes`, or leave it out for one machine.")
    ] = "kubernetes"
    kubeconfig: Annotated[
        Path | None,
        typer.Option(envvar="KUBECONFIG", help="File with server and credentials; default: this pod's."),
    ] = None
    context: Annotated[
        str | None, typer.Option(help="Context of --kubeconfig; default: its current one.")
    ] = None
    namespace: Annotated[str, typer.Option(help="Namespace of the pods of jobs.")] = "penstock"
    nodes: Annotated[
        str, typer.Option(metavar="SELECTOR", help="Labels of the nodes to use; default: all nodes.")
    ] = ""
    gpu_resource: Annotated[str, typer.Option(help="Resource by which the device plugin counts GPUs.")] = (
        "nvidia.com/gpu"
    )
    gpu_memory_mib: Annotated[
        int,
        typer.Option(
            "--gpu-memory-mib",
            min=0,
            help="Memory of a GPU on nodes without the label nvidia.com/gpu.memory; 0: these take no job.",
        ),
    ] = 0
    rack_label: Annotated[str, typer.Option(help="Node label with the rack.")] = "topology.kubernetes.io/rack"
    domain_label: Annotated[
        str, typer.Option(help="Node label with the network domain, which contains racks.")
    ] = "topology.kubernetes.io/zone"
    service: Annotated[
        str,
        typer.Option(help="Headless Service in the namespace, by which members of gangs find each other."),
    ] = "penstock"

    def core(self) -> Options:
        """What decisions depend on."""
        return Options(
            cluster=self.cluster,
            namespace=self.namespace,
            gpu_resource=self.gpu_resource,
            gpu_memory_mib=self.gpu_memory_mib,
            rack_label=self.rack_label,
            domain_label=self.domain_label,
            service=self.service,
        )
