"""The chart, rendered by Helm itself: what holds of all objects under all value sets, and what it refuses."""

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from infra.devservers.build_cache import INFRA, REPOSITORY
from infra.devservers.helm import CHART
from infra.devservers.kubernetes_parts import pinned_version
from penstock import __version__
from penstock.exits import Exit
from penstock.runtime.settings import Settings
from tests.support.helm import (
    CLUSTER_WIDE,
    NAMESPACE,
    NEEDED,
    REPORTER,
    SETS,
    Object,
    helm,
    merged,
    named,
    of_kind,
    pods,
    read_values,
    rendered,
    template,
)

pytestmark = pytest.mark.helm

CREDENTIALS = re.compile(r"://[^/\s@]+@|password", re.IGNORECASE)
PACKAGES = REPOSITORY / "services" / "penstock_services"
SHARED = (
    "libs/penstock/runtime/settings.py",
    "libs/penstock/runtime/service.py",
    "libs/penstock/cli/app.py",
)
REFUSED = "values don't meet the specifications of the schema"

every_set = pytest.mark.parametrize("name", SETS)


def texts(found: Any) -> Iterator[str]:
    """Each text and each key in an object."""
    if isinstance(found, dict):
        for key, value in found.items():
            yield str(key)
            yield from texts(value)
    elif isinstance(found, list):
        for value in found:
            yield from texts(value)
    else:
        yield str(found)


def test_helm_finds_no_fault() -> None:
    done = helm("lint", "--strict", str(CHART), "--kube-version", pinned_version(), values=NEEDED)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_chart_installs_this_version() -> None:
    """A release raised one of the two."""
    (version, app) = re.findall(r"^(?:version|appVersion): (\S+)", (CHART / "Chart.yaml").read_text(), re.M)
    assert version == app == __version__


@every_set
def test_every_pod_is_restricted(name: str) -> None:
    """A namespace that enforces `restricted` refuses a pod that lacks one of these, after the install."""
    found = list(pods(rendered(name)))
    assert found
    for pod_name, pod in found:
        spec, (container,) = pod["spec"], pod["spec"]["containers"]
        assert spec["securityContext"] == {
            "runAsNonRoot": True,
            "runAsUser": 65532,
            "runAsGroup": 65532,
            "fsGroup": 65532,
            "seccompProfile": {"type": "RuntimeDefault"},
        }, pod_name
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }, pod_name
        assert {"name": "tmp", "mountPath": "/tmp"} in container["volumeMounts"]
        assert spec["enableServiceLinks"] is False, pod_name
        kinds = {kind for volume in spec["volumes"] for kind in volume if kind != "name"}
        assert kinds <= {"emptyDir", "projected", "secret", "configMap"}, pod_name
        for volume in spec["volumes"]:
            secret = volume.get("projected") or volume.get("secret")
            assert secret is None or secret["defaultMode"] == 0o400, pod_name


@every_set
def test_only_the_reporter_has_rights(name: str) -> None:
    """One service with a token would make each of them a way into the cluster."""
    objects, namespace = rendered(name), SETS[name].namespace
    subjects = [
        subject
        for each in of_kind(objects, "RoleBinding", "ClusterRoleBinding")
        for subject in each["subjects"]
    ]
    reporter = {"kind": "ServiceAccount", "name": REPORTER, "namespace": namespace}
    assert all(subject == reporter for subject in subjects)
    specs = {pod_name: pod["spec"] for pod_name, pod in pods(objects)}
    with_token = {each for each, spec in specs.items() if spec["automountServiceAccountToken"] is not False}
    plain = (None, "penstock-services")
    accounts = {each for each, spec in specs.items() if spec.get("serviceAccountName") not in plain}
    assert with_token == accounts == ({REPORTER} if subjects else set())
    assert bool(subjects) is (name != "no reporter")


@every_set
def test_there_is_one_placer_at_a_time(name: str) -> None:
    """A rolling update starts the next placer beside the present one, and ends its term."""
    placer = named(rendered(name), "Deployment", "penstock-placer")
    assert (placer["spec"]["replicas"], placer["spec"]["strategy"]) == (1, {"type": "Recreate"})
    replicas = {
        each["metadata"]["name"]: each["spec"]["replicas"] for each in of_kind(rendered(name), "Deployment")
    }
    assert {service for service, count in replicas.items() if count != 1} <= {"penstock-gateway"}
    budgets = of_kind(rendered(name), "PodDisruptionBudget")
    assert [each["metadata"]["name"] for each in budgets] == (
        [] if name == "without policies" else ["penstock-gateway"]
    )


@every_set
def test_no_object_holds_a_password(name: str) -> None:
    """Who may read a Deployment may not read Secrets."""
    objects = rendered(name)
    assert not of_kind(objects, "Secret", "ConfigMap")
    for each in of_kind(objects, "Deployment", "Job", "Pod", "Service", "NetworkPolicy"):
        assert not [text for text in texts(each) if CREDENTIALS.search(text)], each["metadata"]["name"]


@every_set
def test_namespaces_follow_the_release(name: str) -> None:
    """The files of the fence and of the rights are written for the namespace `penstock`."""
    namespace = SETS[name].namespace
    for each in rendered(name):
        expected = None if each["kind"] in CLUSTER_WIDE else namespace
        assert each["metadata"].get("namespace") == expected, each
        text = json.dumps(each)
        accounts = set(re.findall(r"system:serviceaccount:([a-z-]+):", text))
        namespaces = set(re.findall(r'"namespace": "([a-z-]+)"', text))
        assert accounts | namespaces <= {namespace}, each


@every_set
def test_commands_are_console_scripts(name: str) -> None:
    scripts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["scripts"]
    for each in of_kind(rendered(name), "Deployment"):
        (container,) = each["spec"]["template"]["spec"]["containers"]
        (command,) = container["command"]
        assert command in scripts
        assert each["metadata"]["name"] == command


@every_set
def test_variables_are_settings_that_the_service_reads(name: str) -> None:
    """A misspelt variable is ignored, and the service works with its default."""
    known = {f"PENSTOCK_{field.upper()}" for field in Settings.model_fields}
    shared = "".join((REPOSITORY / path).read_text() for path in SHARED)
    for each in of_kind(rendered(name), "Deployment"):
        service = each["metadata"]["name"].removeprefix("penstock-").replace("-", "_")
        own = "".join(path.read_text() for path in (PACKAGES / service).rglob("*.py"))
        (container,) = each["spec"]["template"]["spec"]["containers"]
        variables = [variable["name"] for variable in container["env"]]
        assert len(set(variables)) == len(variables)
        for variable in variables:
            named_in_text = re.search(rf"\b{variable}\b", shared + own) is not None
            of_field = f"\n    {variable.removeprefix('PENSTOCK_').lower()}: " in own
            assert named_in_text or of_field or variable in known | {"TZ", "AWS_REGION"}, variable


@every_set
def test_files_that_variables_name_are_mounted(name: str) -> None:
    """A setting named a key that no volume of its service has: a crash at each start."""
    for pod_name, pod in pods(rendered(name)):
        (container,) = pod["spec"]["containers"]
        folders = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert set(folders) == {volume["name"] for volume in pod["spec"]["volumes"]}, pod_name
        files = set[str]()
        for volume in pod["spec"]["volumes"]:
            sources = volume.get("projected", {}).get("sources", [volume])
            for items in (source.get("secret", {}).get("items", ()) for source in sources):
                files |= {f"{folders[volume['name']]}/{item['path']}" for item in items}
        named_files = {
            variable["value"]
            for variable in container["env"]
            if variable.get("value", "").startswith("/etc/penstock/secrets")
        }
        assert files == named_files, pod_name


def test_each_service_says_when_it_is_ready() -> None:
    """An upgrade counted a service as replaced while it still read the ledger."""
    own = containers("defaults")
    for service in (each["metadata"]["name"] for each in of_kind(rendered("defaults"), "Deployment")):
        probe = own[service]["readinessProbe"]
        if service == "penstock-gateway":
            assert probe["httpGet"] == {"path": "/readyz", "port": "api", "scheme": "HTTP"}
            continue
        assert {"name": "PENSTOCK_HEALTH", "value": "/tmp/health"} in own[service]["env"]
        assert probe["exec"]["command"][-1] == "/opt/penstock/share/health.py"
        assert not {"livenessProbe", "startupProbe"} & set(own[service])


def test_a_service_sees_its_own_urls_alone() -> None:
    """With a key for each service none has the identity of another."""
    for each in of_kind(rendered("defaults"), "Deployment"):
        service = each["metadata"]["name"].removeprefix("penstock-")
        (secrets,) = [v for v in each["spec"]["template"]["spec"]["volumes"] if v["name"] == "secrets"]
        keys = {
            (source["secret"]["name"], item["key"])
            for source in secrets["projected"]["sources"]
            for item in source["secret"]["items"]
        }
        expected = {("penstock-kafka", f"{service}.url")}
        if service != "node-reporter":
            expected.add(("penstock-postgres", f"{service}.url"))
        if service in ("placer", "gateway"):
            expected.add(("penstock-keys", "operator.key"))
        if service == "gateway":
            expected.add(("penstock-keys", "tokens"))
        assert keys == expected


@pytest.mark.parametrize("name", ["no reporter", "some nodes", "set-up"])
def test_programs_take_their_arguments(name: str, tmp_path: Path) -> None:
    """An option was renamed, and its pod ended with a usage text. Here each program ends at what the machine
    lacks, a log or a gateway."""
    token = tmp_path / "token"
    token.write_text("x")
    modules = {
        "penstock-node-reporter": ("penstock_services.node_reporter", Exit.BAD_SPEC, "PENSTOCK_LOG: not set"),
        "penstock-helm-test": ("penstock.cli.main", Exit.UNREACHABLE, "http://127.0.0.1:1"),
        "penstock-setup": ("penstock.log.kafka_setup", Exit.BAD_SPEC, "a log URL begins with"),
    }
    own = {"PENSTOCK_SERVER": "http://127.0.0.1:1", "PENSTOCK_TOKEN_FILE": str(token), "HOME": str(tmp_path)}
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(sys.path), **own}
    for pod_name, container in containers(name).items():
        if pod_name not in modules:
            assert "args" not in container
            continue
        module, status, said = modules[pod_name]
        words = [*container["command"][1:], *container["args"]]
        words = [word for word in words if word not in ("-m", module)]
        known = {
            "$(URL)": "log://nowhere",
            "/opt/penstock/share/acls.yaml": str(INFRA / "kafka" / "acls.yaml"),
        }
        argv = [sys.executable, "-m", module, *(known.get(word, word) for word in words)]
        done = subprocess.run(argv, capture_output=True, text=True, env=env, check=False)
        assert (done.returncode, said in done.stderr) == (status, True), done.stderr


def test_values_reach_their_objects() -> None:
    """A knob that nothing reads is worse than none."""
    spread = named(rendered("gateways"), "Deployment", "penstock-gateway")["spec"]
    assert spread["replicas"] == 3
    (constraint,) = spread["template"]["spec"]["topologySpreadConstraints"]
    assert constraint["labelSelector"]["matchLabels"] == spread["selector"]["matchLabels"]
    for _, pod in pods(rendered("other nodes")):
        assert pod["spec"]["nodeSelector"] == {"pool": "control"}
        assert pod["spec"]["tolerations"][0]["key"] == "control"
        assert pod["spec"]["priorityClassName"] == "system-cluster-critical"
    for _, pod in pods(rendered("own registry")):
        (container,) = pod["spec"]["containers"]
        name = (
            "cluster-reporter:0.1.0"
            if "--cluster" in container.get("args", ())
            else f"services@sha256:{'0' * 64}"
        )
        assert container["image"] == f"registry.internal:5000/penstock/{name}"
        assert pod["spec"]["imagePullSecrets"] == [{"name": "registry"}, {"name": "mirror"}]
    for _, pod in pods(rendered("labels")):
        assert pod["metadata"]["labels"]["team"] == "platform"
        assert pod["metadata"]["annotations"]["prometheus.io/scrape"] == "false"
    words = containers("some nodes")["penstock-node-reporter"]["args"]
    options = dict(zip(words[::2], words[1::2], strict=True))
    assert options == {
        "--backend": "kubernetes",
        "--cluster": "a",
        "--namespace": NAMESPACE,
        "--nodes": "pool=gpu,!broken",
        "--gpu-resource": "amd.com/gpu",
        "--gpu-memory-mib": "81920",
        "--rack-label": "example.test/rack",
        "--domain-label": "example.test/hall",
    }
    door = named(rendered("some nodes"), "ValidatingAdmissionPolicy", "penstock-door")
    assert "'amd.com/gpu' in c.resources.limits" in json.dumps(door)
    assert "nvidia" not in json.dumps(door)
    egress = named(rendered("settings"), "NetworkPolicy", "penstock")["spec"]["egress"]
    assert {"ports": [{"protocol": "TCP", "port": 4318}]} in egress
    assert containers("encrypted")["penstock-gateway"]["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"


def containers(name: str) -> dict[str, Object]:
    return {pod_name: pod["spec"]["containers"][0] for pod_name, pod in pods(rendered(name))}


Mutant = tuple[str, dict[str, Any]]
"""What the message says, and the wrong values."""


def tables(values: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of each table in values.yaml whose keys the chart defines."""
    yield path
    for key, value in values.items():
        if isinstance(value, dict) and value and key != "resources":
            yield from tables(value, (*path, key))


def keys(values: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(path, default) of each value and table."""
    for path in tables(values):
        table = reduce(lambda table, key: table[key], path, values)
        yield from (((*path, key), value) for key, value in table.items())


def pointer(path: tuple[str, ...]) -> str:
    return "".join(f"/{key}" for key in path)


def nested(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    for key in reversed(path):
        value = {key: value}
    found: dict[str, Any] = value
    return found


VALUES_OUT_OF_RANGE = [
    ("/nodeReporter/cluster", {"nodeReporter": {"cluster": ""}}),
    ("/nodeReporter/cluster", {"nodeReporter": {"cluster": "a/b"}}),
    ("/nodeReporter/enabled", {"nodeReporter": {"enabled": False}, "door": {"enabled": True}}),
    ("/nodeReporter/gpuMemoryMib", {"nodeReporter": {"gpuMemoryMib": -1}}),
    ("/gateway/replicas", {"gateway": {"replicas": 0}}),
    ("/gateway/replicas", {"gateway": {"replicas": "3"}}),
    ("/gateway/service/type", {"gateway": {"service": {"type": "ExternalName"}}}),
    ("/gateway/topologySpread/0", {"gateway": {"topologySpread": [{"maxSkew": 1}]}}),
    ("/gateway/resources", {"gateway": {"resources": {"request": {}}}}),
    ("/gateway/resources/limits/memory", {"gateway": {"resources": {"limits": {"memory": "4 GB"}}}}),
    ("/placer", {"placer": {"replicas": 2}}),
    ("/image/pullPolicy", {"image": {"pullPolicy": "Sometimes"}}),
    ("/image/digest", {"image": {"digest": "sha256:abc"}}),
    ("/settings/cellIndex", {"settings": {"cellIndex": 1_000}}),
    ("/settings/traceRatio", {"settings": {"traceRatio": 1.5}}),
    ("/settings/otlp", {"settings": {"otlp": "collector:4318"}}),
    ("/postgres/existingSecret", {"postgres": {"existingSecret": ""}}),
    ("/extraEnv/0", {"extraEnv": [{"nam": "X", "value": "1"}]}),
    ("/extraEnv/0/value", {"extraEnv": [{"name": "X", "value": 1}]}),
    ("/extraEnv/0/name", {"extraEnv": [{"name": "A-B", "value": "1"}]}),
    ("/tolerations/0/effect", {"tolerations": [{"key": "x", "effect": "Never"}]}),
    ("/podLabels/app.kubernetes.io~1managed-by", {"podLabels": {"app.kubernetes.io/managed-by": "penstock"}}),
    ("/podLabels/x", {"podLabels": {"x": 1}}),
    ("/networkPolicy/kafkaPorts/0", {"networkPolicy": {"kafkaPorts": [70_000]}}),
    ("/networkPolicy/gatewayFrom/0", {"networkPolicy": {"gatewayFrom": [{"podSelectr": {}}]}}),
    ("/podDisruptionBudget/maxUnavailable", {"podDisruptionBudget": {"maxUnavailable": 0}}),
    ("/setup/cells", {"setup": {"cells": 0}}),
]


def accepted(mutants: list[Mutant]) -> list[Mutant]:
    """Those that are not refused with the text that they name."""

    def said(mutant: Mutant) -> str:
        done = template(merged(NEEDED, mutant[1]), NAMESPACE, "penstock")
        return "" if done.returncode == 0 else done.stderr

    with ThreadPoolExecutor(2) as threads:
        texts = list(threads.map(said, mutants))
    return [
        each for each, text in zip(mutants, texts, strict=True) if not (REFUSED in text and each[0] in text)
    ]


def test_values_of_another_type_are_refused_with_their_path() -> None:
    """A number came as text, and a list as one word."""
    mutants = list[Mutant]()
    for path, value in keys(read_values()):
        wrong = "text" if isinstance(value, list) else ["list"]  # of no value of the other kinds
        mutants.append((f"at '{pointer(path)}': got ", nested(path, wrong)))
    assert len(mutants) > 60
    assert not accepted(mutants)


def test_unknown_values_are_refused_with_their_path() -> None:
    """A misspelt value was ignored, and found out when its setting was needed."""
    mutants = [
        (f"at '{pointer(path)}': additional properties 'unknwon'", nested((*path, "unknwon"), 1))
        for path in tables(read_values())
    ]
    assert len(mutants) > 20
    assert not accepted(mutants)


def test_values_out_of_range_are_refused_with_their_path() -> None:
    assert not accepted([(f"at '{path}'", values) for path, values in VALUES_OUT_OF_RANGE])


@pytest.mark.slow
def test_values_that_are_taken_away_are_refused_with_their_path() -> None:
    """`null` takes a default away, and a template would fail with a line of its own code."""
    mutants = [
        (f"at '{pointer(path[:-1])}': missing property '{path[-1]}'", nested(path, None))
        for path, _ in keys(read_values())
    ]
    assert not accepted(mutants)


def test_each_value_has_a_comment() -> None:
    """Of a service's resources and variables, which are alike, those of the gateway do."""
    lines = (CHART / "values.yaml").read_text().splitlines()
    bare = [line.strip() for before, line in pairwise(lines) if line and "#" not in before + line]
    assert {line.partition(":")[0] for line in bare} == {"resources", "requests", "extraEnv"}
