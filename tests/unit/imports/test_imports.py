"""Job files of other schedulers: each key is converted, or named with its path and a remedy; nothing is
lost without a word."""

import copy
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from penstock.imports import argo, kubernetes
from penstock.imports.foreign import NotConvertible, convert, job_file, kind_of
from penstock.imports.keys import Imported
from penstock.imports.shell import adapted
from penstock.sdk.job_file.jobfile import parse_job
from tests.support.cli import peers
from tests.support.cli.peers_manifests import MANIFESTS

FILES = {
    "SkyPilot": peers.SKY,
    "dstack": peers.DSTACK,
    "Kubernetes": peers.KUBEFLOW,
    "Ray": peers.RAY,
    "Argo": peers.ARGO,
    "Determined": peers.DETERMINED,
    "sbatch": peers.SBATCH,
}
SAMPLES = {kind: texts for kind, texts in MANIFESTS.items() if kind not in kubernetes.ROLES} | FILES
EACH = [
    pytest.param(kind, text, id=f"{kind}-{n}")
    for kind, texts in SAMPLES.items()
    for n, text in enumerate(texts)
]
_FREE = (
    "env envs secrets env_vars labels metadata tags accelerators limits requests nodeSelector "
    "max_length image hyperparameters environment_variables pytorchReplicaSpecs tfReplicaSpecs "
    "mpiReplicaSpecs"
)
FREE = frozenset(_FREE.split())
"""Sections whose keys are names that people choose."""
_OF_ONE_NOTE = (
    "rayClusterSpec compute_config checkpoint_storage retry job_recovery file_mounts volumes "
    "volumeMounts tolerations outputs ttlStrategy valueFrom lr workerGroupSpecs retryStrategy "
    "headGroupSpec arguments runtimeRef podTemplateOverrides initializer artifacts templateRef "
    "workflowTemplateRef clusterSelector podFailurePolicy plugins network successPolicy "
    "entrypoint_resources policies dependsOn conda"
)
OF_ONE_NOTE = frozenset(_OF_ONE_NOTE.split())
"""Sections that one note, or one number, stands for."""


def imported(text: str) -> Imported:
    return convert(text, "train.sbatch")


def notes_of(found: Imported) -> dict[str, str]:
    return {note.path: note.text for note in found.notes}


@pytest.mark.parametrize(("kind", "text"), EACH)
def test_what_comes_out_is_a_job_file_or_nothing_can_run(kind: str, text: str) -> None:
    """The printed text goes into `penstock submit -f -`; what differs has been named before."""
    found = imported(text)
    assert kind_of(text, asked=True) is not None
    assert kind in found.kind or kind in ("Kubernetes",), found.kind
    for job in found.jobs:
        if "command" not in job and "script" not in job:
            assert any(note.needed for note in found.notes)
            continue
        printed = yaml.safe_load(job_file(job))
        assert printed == job, "the printed file is read as the same fields"
        assert kind_of(job_file(job)) is None, "and is no foreign file itself"
        fields = {key: value for key, value in printed.items() if key != "sync"}
        if not any(note.needed and note.path.endswith(tuple(fields)) for note in found.notes):
            parse_job(fields)


def sections(found: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all mappings whose keys have a meaning of their own."""
    if isinstance(found, dict):
        if found.keys() & {*argo.OTHER_KINDS} or found.get("kind") in ("List", "RayCluster"):
            return  # named as a whole, or holds others
        if not path or path[-1] not in FREE:
            yield path
        for key, value in found.items():
            if (
                key not in FREE - {"image"} | OF_ONE_NOTE
                or key.endswith("ReplicaSpecs")
                or (key == "metadata" and "kind" in found)
            ):
                yield from sections(value, (*path, key))
    elif isinstance(found, list):
        for number, value in enumerate(found):
            yield from sections(value, (*path, number))


@pytest.mark.parametrize(("kind", "text"), [one for one in EACH if "sbatch" not in str(one.id)])
def test_a_key_that_nobody_has_heard_of_is_named_wherever_it_stands(kind: str, text: str) -> None:
    """The next version of each format has keys that this one does not: silence would be a wrong job."""
    documents = list(yaml.safe_load_all(text.lstrip("\ufeff").replace("\t", " ")))
    for number, document in enumerate(documents):
        for path in sections(document):
            changed = copy.deepcopy(documents)
            part = changed[number]
            for step in path:
                part = part[step]
            part["unheard_of"] = 1
            found = imported(yaml.safe_dump_all(changed))
            last = [note.path for note in found.notes if note.path.endswith("unheard_of")]
            assert last or (path[-2:-1] == ("containers",) and path[-1] > 0), f"{kind}: {path}"


def test_there_are_three_files_of_each_kind() -> None:
    """What `penstock import` promises to read has been read as people write it."""
    kinds = {*kubernetes.CONVERTERS, *argo.KINDS, "RayJob", *FILES}
    assert {kind: len(texts) for kind, texts in (MANIFESTS | FILES).items() if len(texts) < 3} == {}
    assert kinds - {"Kubernetes"} <= MANIFESTS.keys() | FILES.keys()


@pytest.mark.parametrize("kind", sorted(kubernetes.ROLES))
def test_kubeflows_kinds_are_alike(kind: str) -> None:
    """TFJob or JAXJob: master and workers are a gang, and all that a pod has besides is named."""
    gang, workers, small = (imported(text) for text in MANIFESTS[kind])
    assert (gang.jobs[0]["workers"], workers.jobs[0]["workers"], small.jobs[0]["workers"]) == (3, 4, 1)
    assert gang.jobs[0]["resources"] == {"gpus": 8, "cores": 12, "host_memory": "95368MiB"}
    assert gang.jobs[0]["gpu_models"] == ["NVIDIA-H100-80GB-HBM3"]
    assert (gang.jobs[0]["env"], gang.jobs[0]["secrets"]) == ({"SEED": "7"}, {"TOKEN": "hub.token"})
    told = {path.rpartition("spec.")[2] for path in notes_of(gang)}
    assert {"initContainers", "tolerations", "volumes", "containers[0].envFrom", "priorityClassName"} <= told
    assert workers.jobs[0]["resources"] == {"gpus": 1, "cores": 3}
    for found in (gang, workers, small):
        parse_job({key: value for key, value in found.jobs[0].items() if key != "sync"})


def test_what_other_schedulers_of_kubernetes_start_together_is_a_gang() -> None:
    """Volcano's tasks, and the jobs of a JobSet; a CronJob is its job, once."""
    gang, servers, alone = (imported(text) for text in MANIFESTS["Job"][2:])
    assert (gang.jobs[0]["workers"], gang.jobs[0]["retry"]) == (3, {"max_attempts": 3})
    assert (servers.jobs[0]["workers"], servers.jobs[0]["parameter_servers"]) == (3, 2)
    assert alone.jobs[0]["command"] == ["python", "t.py"]
    pretrain, driver, _ = (imported(text) for text in MANIFESTS["JobSet"])
    assert (pretrain.jobs[0]["workers"], pretrain.jobs[0]["retry"]) == (8, {"max_attempts": 4})
    assert [note.path for note in driver.notes if note.needed] == ["spec.driver"], "its program is another"
    nightly = imported(MANIFESTS["CronJob"][0])
    assert (nightly.jobs[0]["command"], nightly.jobs[0]["retry"]) == (
        ["python", "nightly.py"],
        {"max_attempts": 2},
    )
    (llama,) = imported(MANIFESTS["TrainJob"][0]).jobs
    assert (llama["workers"], llama["resources"], llama["env"]) == (2, {"gpus": 4}, {"LR": "0.1"})


def test_a_template_in_its_place_and_a_library_of_templates_are_jobs() -> None:
    """Argo's `inline`, and a WorkflowTemplate that others call: nothing of them was a job."""
    (one,) = imported(MANIFESTS["Workflow"][1]).jobs
    assert (one["name"], one["command"]) == ("inline", ["python", "one.py"])
    library = imported(MANIFESTS["WorkflowTemplate"][0])
    assert [job["command"][1] for job in library.jobs] == ["train.py", "{{inputs.parameters.of}}"]
    assert not imported(MANIFESTS["WorkflowTemplate"][2]).jobs


def test_all_workers_of_a_slurm_script_agree_where_rank_zero_is() -> None:
    """The script of PyTorch's own guide asks `hostname` of the first node, and draws the name of the meeting
    by $RANDOM. Here each worker runs it: they meet all the same. Its port is computed from the job's
    number."""
    (job,) = imported(peers.SBATCH[4]).jobs
    script = job["script"].replace("module load", ": module load").replace("conda activate", ": conda")
    met = []
    for rank in "03":
        env = {"RANK": rank, "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "26663"}
        env |= {"PENSTOCK_JOB_ID": "kx9", "PATH": "/usr/bin:/bin"}
        line = script.replace("srun torchrun", "srun echo")
        met.append(
            subprocess.run(["bash", "-euc", line], env=env, capture_output=True, text=True, check=True).stdout
        )
    assert met[0] == met[1]
    assert "--rdzv_endpoint 10.0.0.7:" in met[0]
    assert "--nnodes 4" in met[0]


def test_dstacks_secrets_are_secrets_and_off_is_no_limit() -> None:
    """`${{ secrets.NAME }}`; YAML reads `off` as false."""
    found = imported(peers.DSTACK[3])
    (job,) = found.jobs
    assert (job["secrets"], job["env"]) == ({"WANDB_API_KEY": "wandb"}, {"MODE": "010"})
    assert "run_timeout" not in job
    assert (job["resources"]["gpus"], job["resources"]["cores"]) == (1, 8)
    assert "files" in notes_of(found)
    assert not [note for note in found.notes if note.needed]


def test_skypilots_nodes_are_workers_and_setup_and_run_one_script() -> None:
    """Four nodes of eight GPUs, with the variables that torchrun needs."""
    found = imported(peers.SKY[0])
    (job,) = found.jobs
    assert (job["name"], job["workers"], job["sync"]) == ("pretrain", 4, "~/llm")
    assert job["resources"] == {"cores": 16, "host_memory": "64GiB", "gpus": 8}
    assert (job["gpu_models"], job["environment"]) == (["A100"], {"container": "example/llm:3"})
    assert (job["env"], job["secrets"]) == (
        {"MODEL": "gpt2", "LR": "0.001"},
        {"WANDB_API_KEY": "WANDB_API_KEY"},
    )
    assert job["retry"] == {"max_attempts": 3}
    assert 'export SKYPILOT_NODE_RANK="${RANK:-0}"' in job["script"]
    assert job["script"].index("pip install") < job["script"].index("torchrun")
    assert {"resources.use_spot", "resources.cpus", "secrets.WANDB_API_KEY", "setup"} <= notes_of(
        found
    ).keys()


def test_several_documents_are_several_jobs() -> None:
    """A pipeline of SkyPilot; a value that is missing is named, since the job would run without."""
    found = imported(peers.SKY[2])
    assert [job["name"] for job in found.jobs] == ["train", "eval"]
    assert found.jobs[0]["gpu_models"] == ["L4", "A10G"]
    assert [note.path for note in found.notes if note.needed] == ["envs.CHECKPOINT"]
    assert imported(peers.SKY[3]).jobs[0]["script"] == "echo $A\necho two\n", "a file from Windows"
    assert imported(peers.SKY[1]).jobs[0]["resources"] == {"gpus": 1, "gpu_share": 0.5}


def test_dstacks_gpu_has_a_model_a_memory_and_a_number() -> None:
    """`A100:80GB:4`, a mapping, or memory alone."""
    asked = [imported(text).jobs[0] for text in peers.DSTACK]
    assert (asked[0]["resources"]["gpus"], asked[0]["resources"]["gpu_memory"]) == (4, "76294MiB")
    assert (asked[0]["gpu_models"], asked[0]["workers"], asked[0]["run_timeout"]) == (["A100"], 2, "3d")
    assert (asked[1]["gpu_models"], asked[1]["resources"]["gpus"]) == (["H100", "H200"], 1)
    assert (asked[2]["resources"]["gpus"], asked[2]["grace"]) == (1, "90s")
    notes = notes_of(imported(peers.DSTACK[0]))
    assert "HF_TOKEN has no value" in notes["env"]
    assert {"python", "spot_policy", "resources.disk"} <= notes.keys()
    assert imported("type: service\nname: s\ncommands: [x]\n").jobs == []


def test_master_and_workers_of_a_pytorch_job_are_one_gang() -> None:
    """The same container in both roles; the label of the nodes names the GPU."""
    (job,) = imported(peers.KUBEFLOW[0]).jobs
    assert (job["workers"], job["command"]) == (4, ["python", "train.py", "--epochs", "3"])
    assert job["resources"] == {"gpus": 2, "cores": 4, "host_memory": "16GiB"}
    assert (job["gpu_models"], job["secrets"]) == (["Tesla-V100-SXM2-16GB"], {"KEY": "wandb.api"})
    assert (job["retry"], job["run_timeout"]) == ({"max_attempts": 3}, "7200s")
    notes = notes_of(imported(peers.KUBEFLOW[0]))
    assert "metadata.namespace" in notes
    assert any(path.endswith("volumeMounts") for path in notes)
    (tf,) = imported(peers.KUBEFLOW[1]).jobs
    assert (tf["workers"], tf["parameter_servers"], tf["command"]) == (2, 1, ["python", "w.py"])
    (once,) = imported(peers.KUBEFLOW[2]).jobs
    assert (once["resources"], once["retry"]) == ({"host_memory": "1431MiB", "gpus": 0}, {"max_attempts": 1})
    assert any(note.needed and "mpirun" in note.text for note in imported(peers.KUBEFLOW[3]).notes)


def test_rays_entry_point_is_the_command() -> None:
    """The body of its API; packages are installed before; groups of workers are named."""
    (job,) = imported(peers.RAY[0]).jobs
    assert job["script"] == "pip install torch==2.4 datasets\npython train.py --lr 0.1\n"
    assert job["resources"] == {"gpus": 1, "cores": 1, "host_memory": 1024}
    assert (job["env"], job["sync"], job["labels"]) == ({"A": "1"}, "./", {"team": "nlp"})
    manifest = imported(peers.RAY[1])
    assert (manifest.jobs[0]["command"], manifest.jobs[0]["env"]) == (["python", "tune.py"], {"B": "2"})
    assert any("2 × 4 GPUs" in note.text for note in manifest.notes)
    assert "working_dir" in notes_of(imported(peers.RAY[2]))


def test_argos_parameters_are_filled_and_those_without_a_value_are_named() -> None:
    """`{{workflow.parameters.lr}}` has a value, `epochs` has none."""
    found = imported(peers.ARGO[0])
    (job,) = found.jobs
    assert job["command"] == ["python", "train.py", "--lr=0.1", "--epochs", "{{workflow.parameters.epochs}}"]
    assert (job["name"], job["retry"], job["run_timeout"]) == ("train", {"max_attempts": 3}, "900s")
    assert [note.path for note in found.notes if note.needed] == ["command[4]"]
    chain = imported(peers.ARGO[1])
    assert [(job["name"], job["command"][1:]) for job in chain.jobs] == [
        ("prepare", ["prepare.py", "small"]),
        ("fit", ["fit.py", "small"]),
    ]
    assert any("penstock wait" in note.text for note in chain.notes)
    nightly = imported(peers.ARGO[2])
    assert nightly.jobs[0]["command"] == ["python", "-c", "print('nightly')"]
    assert any(note.needed and note.path.endswith("withItems") for note in nightly.notes)


def test_determineds_trial_is_a_job() -> None:
    """A command as entry point converts; a class for its own harness does not."""
    (job,) = imported(peers.DETERMINED[0]).jobs
    assert (job["script"], job["resources"], job["iterations"]) == (
        "python3 train.py --epochs 3\n",
        {"gpus": 2},
        100,
    )
    assert (job["retry"], job["env"]) == ({"max_attempts": 4}, {"A": "1"})
    assert job["environment"] == {"container": "example/det:1"}
    assert {"hyperparameters.lr", "checkpoint_storage"} <= notes_of(imported(peers.DETERMINED[0])).keys()
    for text in peers.DETERMINED[1:3]:
        assert "command" not in imported(text).jobs[0]
        assert "entrypoint" in notes_of(imported(text))
    assert imported(peers.DETERMINED[3]).jobs[0]["workers"] == 4


def test_an_sbatch_script_has_a_worker_per_task_of_srun() -> None:
    """Two nodes of four tasks, four GPUs and 64 GB each."""
    found = imported(peers.SBATCH[0])
    (job,) = found.jobs
    assert (job["name"], job["workers"], job["run_timeout"]) == ("resnet", 8, "1590m")
    assert (job["resources"], job["gpu_models"]) == (
        {"gpus": 1, "cores": 4, "host_memory": "16GiB"},
        ["a100"],
    )
    assert job["grace"] == "120s"
    needed = [note.path for note in found.notes if note.needed]
    assert needed == ["#SBATCH --array"]
    notes = notes_of(found)
    assert "stands after the first command" in notes["#SBATCH --qos=late"]
    assert {
        "#SBATCH --output",
        "#SBATCH --signal",
        "script: srun",
    } <= notes.keys()
    assert not any("commented" in path or "requeue" in path for path in notes)


def test_an_sbatch_script_without_srun_runs_once_per_node() -> None:
    """torchrun starts its own processes on the node's GPUs."""
    (job,) = imported(peers.SBATCH[1]).jobs
    assert "workers" not in job
    assert job["resources"] == {"gpus": 2, "cores": 8, "host_memory": "32000MiB"}
    assert (job["run_timeout"], job["env"]) == ("90m", {"MODE": "fast"})
    dos = imported(peers.SBATCH[2])
    assert "\r" not in dos.jobs[0]["script"]
    assert [note.path for note in dos.notes if note.needed] == ["#SBATCH --dependency"]
    two = imported(peers.SBATCH[3])
    assert two.jobs[0]["resources"] == {"gpus": 2}
    assert {"#SBATCH --wibble", "#SBATCH --nodes"} <= notes_of(two).keys()


def test_srun_in_a_script_starts_its_command_with_the_ranks_of_penstock() -> None:
    """The lines before the script are a shell's own: what they do is seen by running them."""
    notes: list[Any] = []
    script = adapted(
        "srun -n 8 --mpi=pmix --exclusive echo $SLURM_PROCID of $SLURM_NTASKS\n", "script", notes
    )
    env = {"RANK": "3", "WORLD_SIZE": "8", "PATH": "/usr/bin:/bin"}
    answer = subprocess.run(["bash", "-euc", script], env=env, capture_output=True, text=True, check=True)
    assert answer.stdout == "3 of 8\n"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "no known kind"),
        ("just a text\n", "no known kind"),
        ("a: [1\n", "not valid YAML"),
        ("a:\n\t- b\n", "indent with blanks"),
        ("#!/bin/bash\n#PBS -l nodes=1\n", "#PBS"),
        ("command: [x]\n", "penstock submit -f FILE"),
        ("[[[[", "not valid YAML"),
    ],
)
def test_a_file_of_no_known_kind_is_refused_with_the_remedy(text: str, complaint: str) -> None:
    """A note, a broken file, another batch system's script, and one of ours."""
    with pytest.raises(NotConvertible, match=complaint.replace("#", r"\#")):
        convert(text, "x")


def test_a_manifest_that_runs_nothing_is_named() -> None:
    """A Deployment serves for ever; a ConfigMap stands beside a job in its file."""
    deployment = convert("apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: x}\n", "x")
    assert deployment.jobs == []
    assert deployment.notes[0].needed
    both = convert("apiVersion: v1\nkind: ConfigMap\n---" + peers.KUBEFLOW[2], "x")
    assert len(both.jobs) == 1
    assert not any(note.needed for note in both.notes if note.path == "kind")


@pytest.mark.parametrize("value", ["null", "3", "[1, {a: b}]", "{a: [b]}", "text", "true"])
def test_a_value_of_another_shape_is_named_and_breaks_nothing(value: str) -> None:
    """`resources: 4`, `envs: [A]`: other versions of the formats, and slips."""
    keys = (
        "resources",
        "envs",
        "run",
        "setup",
        "num_nodes",
        "env",
        "commands",
        "entrypoint",
        "searcher",
        "spec",
        "metadata",
        "runtime_env",
        "environment",
        "hyperparameters",
        "nodes",
        "name",
        "workdir",
    )
    bases = (
        "run: x\nenvs: {}\n",
        "type: task\n",
        "searcher: {}\nentrypoint: x\n",
        "entrypoint: x\nruntime_env: {}\n",
        "apiVersion: v1\nkind: Pod\n",
        "apiVersion: x\nkind: Workflow\n",
        "apiVersion: x\nkind: PyTorchJob\n",
    )
    for base in bases:
        for key in keys:
            document = yaml.safe_load(base) | {key: yaml.safe_load(value)}
            try:
                found = convert(yaml.safe_dump(document), "x")
            except NotConvertible:
                continue
            assert isinstance(found.notes, list)
