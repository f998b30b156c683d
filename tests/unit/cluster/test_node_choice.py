"""Stories of jobs that choose their nodes: by name, by label, and not where they failed before."""

import pytest
from msgspec.structs import replace

from penstock.cluster.reasons import Reason
from penstock.errors import ConfigurationError
from penstock.model.inputs.external_events import NodeJoined
from penstock.model.jobs.job_parts import Environment, NodeChoice
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.nodes import NodeSpec
from penstock.model.nouns.settings import PlacerSettings
from penstock.scheduling import profiles
from penstock.sdk.job_file.jobfile import BadJob, parse_job
from penstock.why.explain import explain
from penstock_services.node_reporter.shell.measure.inventory import labels_of
from tests.support.cluster.driver import CellDriver, estimate, job_spec, node_spec


def labelled(node_id: str, **labels: str) -> NodeSpec:
    return replace(node_spec(node_id), labels=labels)


@pytest.fixture
def cell() -> CellDriver:
    driver = CellDriver(PlacerSettings())
    driver.join(labelled("n1", disk="hdd"), labelled("n2", disk="ssd"), labelled("n3", disk="ssd", zone="b"))
    return driver


def choosing(**nodes: tuple[str, ...]) -> JobSpec:
    return replace(job_spec(), nodes=NodeChoice(**nodes))


def placed(cell: CellDriver, job_id: str) -> str:
    [task] = cell.job(job_id).tasks.values()
    return task.place.node_id


@pytest.mark.parametrize(
    ("chosen", "where"),
    [
        ({"only": ("n2",)}, "n2"),
        ({"only": ("disk=ssd",)}, "n2"),
        ({"only": ("disk=ssd&zone=b",)}, "n3"),
        ({"exclude": ("n1",)}, "n2"),
        ({"exclude": ("n1", "n2")}, "n3"),
        ({"prefer": ("zone=b",)}, "n3"),
        ({"only": ("disk=ssd",), "prefer": ("zone=b",)}, "n3"),
        ({"only": ("disk=ssd",), "prefer": ("n1",)}, "n2"),
        ({"prefer": ("zone=nowhere",)}, "n1"),
    ],
)
def test_a_job_runs_where_it_allows(cell: CellDriver, chosen: dict[str, tuple[str, ...]], where: str) -> None:
    """A data set lies on some nodes only, one node is known to be slow, one has the faster disk."""
    cell.submit("j", choosing(**chosen))
    assert placed(cell, "j") == where


@pytest.mark.parametrize("profile", profiles.names())
def test_every_profile_keeps_to_the_choice(profile: str) -> None:
    """Whatever decides the order, no job runs on a node that it does not allow."""
    cell = CellDriver(PlacerSettings(profile=profile))
    cell.join(labelled("n1", disk="hdd"), labelled("n2", disk="ssd"))
    cell.submit("j", choosing(only=("disk=ssd",)), estimate(2))
    cell.submit("k", choosing(exclude=("n2",)), estimate(2))
    cell.at(200_000)
    where = {
        job_id: {task.place.node_id for task in job.tasks.values()} for job_id, job in cell.state.jobs.items()
    }
    assert where == {"j": {"n2"}, "k": {"n1"}}


def test_a_job_waits_for_the_nodes_that_it_allows(cell: CellDriver) -> None:
    """The node with the data is busy: the job waits beside idle ones, by its own wish, and `why` counts
    them."""
    cell.submit("full", choosing(only=("n2",)), estimate(4))
    cell.submit("waits", choosing(only=("n2",)), estimate(4))
    found = explain(cell.state, "waits")
    assert found.reason is Reason.GPUS_BUSY
    assert found.histogram[Reason.NODES_EXCLUDED] == 2
    cell.start("full")
    cell.exit("full.1.w0", 0)
    assert placed(cell, "waits") == "n2"


def test_nobody_waits_behind_a_job_for_other_nodes(cell: CellDriver) -> None:
    """The first in line wants a busy node; the one behind it allows the idle ones."""
    cell.submit("full", choosing(only=("n2",)), estimate(4))
    cell.submit("waits", choosing(only=("n2",)), estimate(4))
    cell.submit("other", choosing(exclude=("n2",)), estimate(4))
    assert placed(cell, "other") == "n1"


def test_nodes_that_do_not_exist_are_told_at_once(cell: CellDriver) -> None:
    """A typing error in a node's name: the job is told, and starts when such a node joins in time."""
    cell.submit("j", choosing(only=("n9",)))
    found = explain(cell.state, "j")
    assert (found.reason, found.now_or_never) == (Reason.NEVER_FITS_NODES, "never")
    assert "n9" in found.detail
    cell.feed(NodeJoined(node=node_spec("n9")))
    assert placed(cell, "j") == "n9"


def test_a_gang_that_its_nodes_cannot_hold_never_fits(cell: CellDriver) -> None:
    """Two nodes are allowed, and the gang needs three."""
    cell.submit("j", replace(choosing(only=("disk=ssd",)), workers=3), estimate(4))
    assert explain(cell.state, "j").reason is Reason.NEVER_FITS_GANG


def test_a_retry_avoids_the_node_where_it_failed(cell: CellDriver) -> None:
    """Four attempts on the same broken node are one attempt: the next one goes elsewhere, if there is
    room."""
    cell.submit("j", job_spec(attempts=4))
    ran = []
    for attempt in range(1, 4):
        cell.start("j")
        ran.append(placed(cell, "j"))
        cell.exit(f"j.{attempt}.w0", 1)
        cell.at(attempt * 100_000)
    assert ran == ["n1", "n2", "n3"]
    assert "not on n1" in cell.explanations[1].reason


def test_a_retry_goes_back_where_nothing_else_fits(cell: CellDriver) -> None:
    """The other nodes are busy for days: an attempt on the same node, on other GPUs, is better than none."""
    cell.submit("j", job_spec(attempts=2))
    for number in (2, 3):
        cell.submit(f"full{number}", choosing(only=(f"n{number}",)), estimate(4))
    cell.start("j")
    cell.exit("j.1.w0", 1)
    cell.at(100_000)
    [task] = cell.job("j").tasks.values()
    assert (task.place.node_id, task.place.gpus) == ("n1", (1,))


def test_a_job_file_names_nodes_and_labels() -> None:
    """As people write it; a wrong term is refused with its field."""
    fields = {"command": ["true"], "nodes": {"only": ["disk=ssd"], "exclude": ["n7"], "prefer": ["rack=r0"]}}
    assert parse_job(fields).nodes == NodeChoice(only=("disk=ssd",), exclude=("n7",), prefer=("rack=r0",))
    with pytest.raises(BadJob) as error:
        parse_job({"command": ["true"], "nodes": {"only": ["a b"], "without": ["n7"]}})
    assert {problem.field for problem in error.value.problems} == {"nodes.only.0", "nodes.without"}


def test_labels_of_a_node_are_checked() -> None:
    """An operator's typing error stops the reporter with the flag's name."""
    assert labels_of(["disk=ssd", "zone=b"]) == {"disk": "ssd", "zone": "b"}
    for wrong in (["disk"], ["disk=ssd", "disk=hdd"], ["rack=r1"]):
        with pytest.raises(ConfigurationError, match="--label"):
            labels_of(wrong)


def images_only(node_id: str) -> NodeSpec:
    return replace(node_spec(node_id), runs="images")


def test_a_program_runs_on_no_node_that_takes_images_alone() -> None:
    """A cell of two machines and a Kubernetes cluster: a script without an image waits for a machine, though
    the cluster is idle; one with an image runs anywhere."""
    cell = CellDriver(PlacerSettings())
    cell.join(images_only("k8s/n1"), images_only("k8s/n2"), node_spec("n3"))
    cell.submit("full", job_spec(), estimate(4))
    cell.submit("program", job_spec(), estimate(4))
    cell.submit("image", replace(job_spec(), environment=Environment(container="torch:2")), estimate(4))
    assert placed(cell, "full") == "n3"
    assert placed(cell, "image").startswith("k8s/")
    found = explain(cell.state, "program")
    assert found.reason is Reason.GPUS_BUSY
    assert found.histogram[Reason.NODES_EXCLUDED] == 2


def test_a_program_in_a_cell_of_clusters_is_told_to_name_an_image() -> None:
    """Where only clusters are, the job can never start; it starts once a machine joins."""
    cell = CellDriver(PlacerSettings())
    cell.join(images_only("k8s/n1"))
    cell.submit("j", job_spec())
    found = explain(cell.state, "j")
    assert (found.reason, found.now_or_never) == (Reason.NEVER_FITS_NODES, "never")
    assert "container: IMAGE" in found.detail
    cell.feed(NodeJoined(node=node_spec("n2")))
    assert placed(cell, "j") == "n2"


@pytest.mark.parametrize(
    "asks",
    [
        {"secrets": {"KEY": "key"}},
        {"code": "0" * 64},
        {"prelaunch": True},
        {"interactive": True},
        {"may_submit": True},
        {"checkpoint": "sdk"},
    ],
    ids=str,
)
def test_a_job_with_what_no_pod_has_is_placed_on_no_cluster(asks: dict[str, object]) -> None:
    """It would be refused there, attempt after attempt."""
    image = replace(job_spec(), environment=Environment(container="torch:2"))
    assert image.runs_as_image
    cell = CellDriver(PlacerSettings())
    cell.join(images_only("k8s/n1"))
    spec = replace(image, **asks) if "interactive" not in asks else replace(job_spec(), **asks)
    cell.submit("j", spec)
    assert explain(cell.state, "j").reason is Reason.NEVER_FITS_NODES
