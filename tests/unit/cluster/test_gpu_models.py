"""GPU models as people write them, against the names that nodes report; and jobs that this cell can never
run."""

import pytest

from penstock.cluster.capacity import never_fits
from penstock.model.jobs.job_parts import NodeChoice, ResourceRequest
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.allowed import Allowed
from penstock.model.nouns.gpu_names import allows
from penstock.model.nouns.settings import PlacerSettings
from penstock.scheduling import profiles
from penstock.sdk.job_file.jobfile import BadJob, parse_job
from penstock_papers.baselines.preempting.free_gpus import GpuKinds
from penstock_services.gateway.core.impossible import impossible
from tests.support.cluster import builders as b
from tests.support.cluster.driver import CellDriver, estimate, job_spec, node_spec

A100 = "NVIDIA-A100-SXM4-80GB"


@pytest.mark.parametrize(
    ("asked", "reported"),
    [
        ("v100", "V100"),
        ("Tesla-V100-SXM2-16GB", "V100"),
        ("NVIDIA-V100", "Tesla-V100-SXM2-16GB"),
        ("V100:1", "V100"),
        ("a100", A100),
        ("A100-80GB", A100),
        ("tesla_v100", "Tesla-V100-PCIE-32GB"),
        ("rtx3090", "NVIDIA-GeForce-RTX-3090"),
        ("RTX-3090", "rtx3090"),
        ("h100", "NVIDIA-H100-80GB-HBM3"),
        ("MI300X", "AMD-Instinct-MI300X-OAM"),
        ("RTX-6000-Ada", "NVIDIA-RTX-6000-Ada-Generation"),
    ],
)
def test_a_model_is_known_by_its_parts(asked: str, reported: str) -> None:
    """Lower case from Slurm's gres, a label of Kubernetes, the name that `nvidia-smi -L` prints."""
    assert allows((asked,), reported)
    assert allows(("K80", asked), reported)


def test_a_line_of_nvidia_smi_and_a_number_of_gpus_are_understood() -> None:
    """`nvidia-smi -L` copied whole; a price list's `8xA100`."""
    spec = parse_job({"command": ["x"], "gpu_models": ["GPU 0: Tesla V100-SXM2-16GB (UUID: GPU-5c8b)"]})
    assert spec.gpu_models == ("Tesla-V100-SXM2-16GB",)
    for written, remedy in (
        ("8xA100", "write A100, and `resources: {gpus: 8}`"),
        ("V100:2", "write V100, and"),
    ):
        with pytest.raises(BadJob, match=remedy):
            parse_job({"command": ["x"], "gpu_models": [written]})


@pytest.mark.parametrize(
    ("asked", "reported"),
    [
        ("a10", A100),
        ("a100", "NVIDIA-A10"),
        ("A100-40GB", A100),
        ("3090", "NVIDIA-GeForce-RTX-3090-Ti"),
        ("RTX-6000", "NVIDIA-RTX-6000-Ada-Generation"),
        ("L40", "NVIDIA-L40S"),
        ("a100", "NVIDIA-A100-SXM4-40GB-MIG-1g.5gb"),
        ("NVIDIA", A100),
        ("v100", ""),
    ],
)
def test_another_model_does_not_match(asked: str, reported: str) -> None:
    """A job tuned for 80 GB must not start on 40, nor on a card whose name begins alike."""
    assert not allows((asked,), reported)
    assert allows((), reported), "without a list any model is allowed"
    assert allows((reported,), reported), "the exact name always is"


def test_the_placer_matches_as_people_write() -> None:
    """A job for `a100` in a cell with two kinds: its nodes are those of the A100s, also ones that join
    later."""
    state = b.cell_of([b.node("old", gpu_model="V100"), b.node("new", gpu_model=A100)])
    need = b.need(gpus=1)
    assert state.index.candidates(need, Allowed(("a100",))) == state.nodes["new"].bit
    assert state.index.candidates(need, Allowed(("Tesla-V100-SXM2-16GB",))) == state.nodes["old"].bit
    assert state.index.candidates(need, Allowed(("h100",))) == 0


def test_nvidia_smis_name_with_blanks_is_taken_and_a_wrong_number_is_not() -> None:
    """SkyPilot writes model and number in one word."""
    fields = {"command": ["x"], "gpu_models": ["Tesla V100-SXM2-16GB", "V100:4"], "resources": {"gpus": 4}}
    assert parse_job(fields).gpu_models == ("Tesla-V100-SXM2-16GB", "V100:4")
    with pytest.raises(BadJob, match=r"write V100, and `resources: \{gpus: 4\}` \(--gpus\)"):
        parse_job({"command": ["x"], "gpu_models": ["V100:4"]})


@pytest.mark.parametrize(
    ("asked", "field", "text"),
    [
        ({"gpu_models": ("a100",)}, "gpu_models", "no node has an a100; V100: 12"),
        ({"gpu_models": ("H100", "t4"), "gpus": 1}, "gpu_models", "no node has an H100 or a t4; V100: 12"),
        ({"gpus": 9}, "resources.gpus", "one worker needs 9 GPUs; the largest node has 8"),
        ({"cores": 999}, "resources.cores", "the largest suitable node has 64"),
        ({"gpu_memory_mib": 1 << 20}, "resources.gpu_memory_mib", "the largest suitable node has 16384"),
        ({"gpus": 8, "workers": 2}, "workers", "the empty cell has room for 1"),
    ],
)
def test_what_can_never_run_is_said_with_what_exists(asked: dict[str, object], field: str, text: str) -> None:
    """It used to be known only when the job had queued, and then by `penstock why` alone."""
    state = b.cell_of([b.node("large"), b.node("small", gpus=4)])
    outer = {name: asked.pop(name) for name in ("gpu_models", "workers") if name in asked}
    spec = JobSpec(command=("x",), resources=ResourceRequest(**asked), **outer)  # type: ignore[arg-type]
    found = impossible(state, spec)
    assert found is not None
    assert (found.field, text in found.message) == (field, True), found
    assert "until such a node joins" in found.remedy


def test_a_model_that_exists_on_smaller_nodes_alone_is_named_with_its_number() -> None:
    """Two A100 in one node and eight V100 in another; the job wants four A100."""
    state = b.cell_of([b.node("large"), b.node("small", gpu_model="A100", gpus=2)])
    job = b.queued(state, worker=b.need(gpus=4), gpu_models=("a100",))
    text = "never_fits_gpu_model: no node has 4 GPUs of a100; the largest has 2; A100: 2, V100: 8"
    assert never_fits(state, job.demand) == text


def test_nodes_that_do_not_exist_are_named() -> None:
    """A job file from another cluster names its nodes."""
    spec = JobSpec(command=("x",), nodes=NodeChoice(only=("gpu-07",)))
    found = impossible(b.cell_of([b.node("n1")]), spec)
    assert found is not None
    assert (found.field, "allowed are gpu-07" in found.message) == ("nodes", True), found


@pytest.mark.parametrize("profile", profiles.names())
def test_every_profile_places_a_job_by_a_part_of_the_models_name(profile: str) -> None:
    """Two jobs want the one node with V100, which reports NVML's whole name."""
    cell = CellDriver(PlacerSettings(profile=profile))
    cell.join(node_spec("n1", 1, model="Tesla-V100-SXM2-16GB"), node_spec("n2", 4, model="T4"))
    for job_id in ("j", "k"):
        cell.submit(job_id, job_spec(models=("v100",)), estimate(1))
    cell.at(200_000)
    running = [job for job in cell.state.jobs.values() if job.tasks]
    assert running
    assert {task.place.node_id for job in running for task in job.tasks.values()} == {"n1"}


def test_plans_of_whole_queues_know_the_names_parts() -> None:
    """Which kinds of nodes suit a waiting job: else a plan would leave its GPUs to others."""
    state = b.cell_of([b.node("n1", gpu_model="Tesla-V100-SXM2-16GB"), b.node("n2", gpu_model="T4")])
    job = b.queued(state, worker=b.need(gpus=1), gpu_models=("v100",))
    kinds = GpuKinds(state)
    assert [kinds.nodes[kind] for kind in kinds.need(job.demand_key, job).suited] == [1]


def test_what_may_fit_has_no_warning() -> None:
    """Nor has any job in a cell whose nodes have not joined yet."""
    spec = JobSpec(command=("x",), gpu_models=("v100",), resources=ResourceRequest(gpu_share_milli=500))
    assert impossible(b.cell_of([b.node("n1")]), spec) is None
    assert impossible(b.cell_of([]), JobSpec(command=("x",), gpu_models=("h100",))) is None
