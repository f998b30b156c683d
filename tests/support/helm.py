"""Renderings of the chart `infra/helm/penstock`, and the sets of values with which tests render the chart."""

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from infra.devservers.helm import CHART, obtain_helm
from infra.devservers.kubernetes_parts import pinned_version

Values = Mapping[str, Any]
Object = dict[str, Any]
NAMESPACE = "gpu-team"
REPORTER = "penstock-node-reporter"
NEEDED: Values = {"nodeReporter": {"cluster": "a"}}
"""Without these the chart is refused."""
CLUSTER_WIDE = {
    "ClusterRole",
    "ClusterRoleBinding",
    "ValidatingAdmissionPolicy",
    "ValidatingAdmissionPolicyBinding",
}


@dataclass(frozen=True)
class ValueSet:
    """Values beside `NEEDED`, and where the release is installed."""

    values: Values = field(default_factory=dict)
    namespace: str = NAMESPACE
    release: str = "penstock"


SETS: Mapping[str, ValueSet] = {
    "defaults": ValueSet(),
    "door": ValueSet({"door": {"enabled": True}}),
    "gateways": ValueSet(
        {
            "gateway": {
                "replicas": 3,
                "topologySpread": [
                    {
                        "maxSkew": 1,
                        "topologyKey": "kubernetes.io/hostname",
                        "whenUnsatisfiable": "DoNotSchedule",
                    }
                ],
            }
        }
    ),
    "no reporter": ValueSet({"nodeReporter": {"enabled": False, "cluster": ""}}),
    "log in Postgres": ValueSet({"kafka": {"existingSecret": ""}}),
    "one key for all": ValueSet({"kafka": {"sharedKey": "url"}, "postgres": {"sharedKey": "url"}}),
    "encrypted": ValueSet(
        {
            "gateway": {"tls": {"existingSecret": "gateway-tls"}},
            "ca": {"existingConfigMap": "authorities", "gatewayKey": "gateway.pem"},
        }
    ),
    "more variables": ValueSet(
        {
            "extraEnv": [{"name": "TZ", "value": "UTC"}],
            "placer": {"extraEnv": [{"name": "PENSTOCK_SEED", "value": "7"}]},
            "gateway": {
                "extraEnv": [
                    {"name": "AWS_REGION", "valueFrom": {"configMapKeyRef": {"name": "s3", "key": "region"}}}
                ]
            },
        }
    ),
    "other nodes": ValueSet(
        {
            "nodeSelector": {"pool": "control"},
            "tolerations": [{"key": "control", "operator": "Equal", "value": "only", "effect": "NoSchedule"}],
            "priorityClassName": "system-cluster-critical",
        }
    ),
    "own registry": ValueSet(
        {
            "image": {
                "registry": "registry.internal:5000",
                "digest": "sha256:" + "0" * 64,
                "pullPolicy": "Always",
                "pullSecrets": ["registry", "mirror"],
            }
        }
    ),
    "another namespace": ValueSet({"door": {"enabled": True}}, namespace="ml-platform", release="scheduler"),
    "namespace penstock": ValueSet({"door": {"enabled": True}}, namespace="penstock"),
    "set-up": ValueSet({"setup": {"enabled": True, "cells": 3}, "ca": {"existingConfigMap": "authorities"}}),
    "settings": ValueSet(
        {
            "settings": {
                "cell": "west",
                "cellIndex": 2,
                "profile": "tiresias",
                "otlp": "http://collector.tracing:4318",
                "traceRatio": 0.25,
                "logLevel": "DEBUG",
            }
        }
    ),
    "without policies": ValueSet(
        {"networkPolicy": {"enabled": False}, "podDisruptionBudget": {"enabled": False}}
    ),
    "narrow network": ValueSet(
        {
            "networkPolicy": {
                "gatewayFrom": [
                    {"namespaceSelector": {"matchLabels": {"team": "research"}}},
                    {"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.9.0.0/16"]}},
                ],
                "kafkaPorts": [9094],
                "nodeLogPorts": [],
                "extraEgress": [{"ports": [{"protocol": "UDP", "port": 5353}]}],
            }
        }
    ),
    "limits": ValueSet({"placer": {"resources": {"limits": {"cpu": 2, "memory": "4Gi"}}}}),
    "labels": ValueSet(
        {"podLabels": {"team": "platform"}, "podAnnotations": {"prometheus.io/scrape": "false"}}
    ),
    "some nodes": ValueSet(
        {
            "nodeReporter": {
                "nodes": "pool=gpu,!broken",
                "gpuResource": "amd.com/gpu",
                "gpuMemoryMib": 81_920,
                "rackLabel": "example.test/rack",
                "domainLabel": "example.test/hall",
            },
            "door": {"enabled": True},
        }
    ),
    "load balancer": ValueSet(
        {"gateway": {"service": {"type": "LoadBalancer", "annotations": {"example.test/internal": "true"}}}}
    ),
}


def merged(values: Values, over: Values) -> dict[str, Any]:
    """`values` with those of `over`, tables merged as Helm merges them."""
    result = dict(values)
    for name, value in over.items():
        known = result.get(name)
        both = isinstance(known, Mapping) and isinstance(value, Mapping)
        result[name] = merged(known, value) if both else value  # type: ignore[arg-type]
    return result


def helm(*words: str, values: Values | None = None) -> "subprocess.CompletedProcess[str]":
    """`helm WORDS`, with these values instead of stdin; nothing of the user's own settings is read."""
    with tempfile.TemporaryDirectory(prefix="pshelm-") as folder:
        env = {"PATH": os.environ["PATH"], "HOME": folder}
        argv = [str(obtain_helm()), *words, *(("-f", "-") if values is not None else ())]
        text = None if values is None else json.dumps(values)
        return subprocess.run(argv, input=text, capture_output=True, text=True, env=env, check=False)


def template(values: Values, namespace: str, release: str) -> "subprocess.CompletedProcess[str]":
    """`helm template` of the chart."""
    where = ("-n", namespace, "--kube-version", pinned_version())
    return helm("template", release, str(CHART), *where, values=values)


@cache
def rendered(name: str) -> Sequence[Object]:
    """All objects of the value set of this name, those of hooks as well."""
    found = SETS[name]
    done = template(merged(NEEDED, found.values), found.namespace, found.release)
    assert done.returncode == 0, done.stderr
    return [each for each in yaml.safe_load_all(done.stdout) if each]


def of_kind(objects: Sequence[Object], *kinds: str) -> list[Object]:
    return [each for each in objects if each["kind"] in kinds]


def named(objects: Sequence[Object], kind: str, name: str) -> Object:
    """The only object of this kind and name."""
    (found,) = [each for each in of_kind(objects, kind) if each["metadata"]["name"] == name]
    return found


def pods(objects: Sequence[Object]) -> Iterator[tuple[str, Object]]:
    """(name, pod as its controller would make it) of each pod, Deployment and Job."""
    for each in of_kind(objects, "Deployment", "Job", "Pod"):
        pod = each if each["kind"] == "Pod" else each["spec"]["template"]
        name = each["metadata"]["name"]
        metadata = {**pod["metadata"], "name": name, "namespace": each["metadata"]["namespace"]}
        yield name, {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod["spec"]}


def read_values(path: Path = CHART / "values.yaml") -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text())
    return found
