"""The command of a cluster's reporter: one entry for machines and clusters, each with its own options."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock_services.node_reporter import __main__ as entry
from penstock_services.node_reporter.kubernetes import command
from penstock_services.node_reporter.kubernetes.options import ClusterOptions


@pytest.mark.parametrize(
    ("words", "cluster"),
    [
        ("--backend kubernetes --cluster k8s", True),
        ("--cluster k8s --backend=kubernetes", True),
        ("--backend machine --node-id n1", False),
        ("--node-id kubernetes", False),
        ("--backend", False),
        ("", False),
    ],
)
def test_one_command_for_machines_and_clusters(words: str, cluster: bool) -> None:
    """The backend decides which options exist."""
    assert entry.of_cluster(words.split()) is cluster


def given(monkeypatch: pytest.MonkeyPatch, *words: str) -> ClusterOptions:
    """The options with which the service would start."""
    found: list[Any] = []
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setattr(command, "serve", lambda name, run: None)
    monkeypatch.setattr(command, "runner", found.append)
    result = CliRunner().invoke(command.app, words)
    assert result.exit_code == 0, result.output
    [options] = found
    assert isinstance(options, ClusterOptions)
    return options


def test_a_cluster_with_labels_and_resources_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """AMD's GPUs, a site's own labels, a namespace per team: all reach the decisions."""
    words = "--backend kubernetes --cluster k8s --namespace team --kubeconfig /etc/kube --context west"
    words += " --nodes pool=gpu --gpu-resource amd.com/gpu --gpu-memory-mib 65536 --service gangs"
    words += " --rack-label site/rack --domain-label site/hall"
    options = given(monkeypatch, *words.split())
    assert (options.kubeconfig, options.context, options.nodes) == (Path("/etc/kube"), "west", "pool=gpu")
    core = options.core()
    assert (core.cluster, core.namespace, core.service) == ("k8s", "team", "gangs")
    assert (core.gpu_resource, core.gpu_memory_mib) == ("amd.com/gpu", 65_536)
    assert (core.rack_label, core.domain_label) == ("site/rack", "site/hall")


def test_a_cluster_needs_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(command.app, ["--backend", "kubernetes"])
    assert result.exit_code == 2
    assert "--cluster" in result.output
