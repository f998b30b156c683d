"""The Tiltfile starts what there is, and each service of its own with its own rights."""

import re
import shlex
from pathlib import Path

import yaml

from penstock.local.services import NAMES
from tests.support.cli.tiltfile import FOLDER, ROLES, ROOT, SERVICE, service_environments, tilts_resources

COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
MAKEFILE = (ROOT / "Makefile").read_text()


def test_every_resource_starts_something_that_exists() -> None:
    """A make target or job file was renamed: `tilt up` would show a red resource on the next developer's
    machine."""
    resources = tilts_resources()
    targets = {line.split(":")[0] for line in MAKEFILE.splitlines() if ":" in line}
    for resource in resources.values():
        command = resource.get("cmd") or resource.get("serve_cmd")
        for words in map(str.split, command.split(" && ")):
            assert words[0] in ("make", ".venv/bin/penstock", ".venv/bin/python", "docker"), command
            if words[0] == "make":
                assert words[1] in targets, command
            if words[0] == "docker":
                assert words[1] == "compose", command
                assert words[-1] in COMPOSE, command
            if words[0] == ".venv/bin/python":
                assert (ROOT / "services" / words[2].replace(".", "/") / "__main__.py").is_file(), command
            if "-f" in words:
                assert (ROOT / words[words.index("-f") + 1]).is_file(), command
        assert set(resource.get("resource_deps", [])) <= set(resources)
    assert {"penstock", "kafka", "jaeger"} <= set(resources)


def test_every_sample_job_can_be_submitted_from_tilt() -> None:
    names = set(tilts_resources())
    assert {file.stem for file in (FOLDER / "jobs").glob("*.yaml")} <= names


def test_every_service_of_its_own_has_its_own_role_and_no_other() -> None:
    """A developer starts the services one by one: a copied line would give one of them the rights of another,
    or the superuser's."""
    services = service_environments(Path("urls"))
    assert {*NAMES, "node-0", "node-1"} == set(services)
    for name, environment in services.items():
        resource = tilts_resources()[name]
        module, *arguments = shlex.split(resource["serve_cmd"].removeprefix(SERVICE))
        own = {"PENSTOCK_DSN_FILE": f"urls/{name}.url"}
        if module == "node_reporter":
            assert arguments[:2] == ["--node-id", name]
            own = {"PENSTOCK_LOG_FILE": f"urls/nodes/{name}.url"}
        else:
            assert module == name.replace("-", "_")
        if name in ("placer", "gateway"):
            own["PENSTOCK_OPERATOR_KEY"] = "urls/operator.key"
        rights = {variable for variable in environment if not variable.startswith("PENSTOCK_GATEWAY")}
        assert {variable: environment[variable] for variable in rights} == own, name
        assert resource["resource_deps"] == ["roles"]


def test_the_superusers_password_is_that_of_the_container_and_given_to_the_set_up_alone() -> None:
    postgres = COMPOSE["postgres"]["environment"]
    user, password, database = (postgres[f"POSTGRES_{part}"] for part in ("USER", "PASSWORD", "DB"))
    url = f"postgresql://{user}:{password}@127.0.0.1:5432/{database}"
    assert f"ADMINISTRATOR ?= {url}\n" in MAKEFILE
    (recipe,) = re.findall(r"^roles:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    assert MAKEFILE.count("$(ADMINISTRATOR)") == recipe.count("$(ADMINISTRATOR)") == 1
    assert f"ROLES := {ROLES}\n" in MAKEFILE
    for name in ("docker-compose.yml", "tilt/Tiltfile"):
        assert f"{user}:{password}@" not in (ROOT / name).read_text(), name
