"""Scripts for `sbatch` as job files: `#SBATCH` lines become fields, the script itself is stored and run in
each worker.

sbatch runs a script once, on the first node, and `srun` starts the tasks. Here each worker runs the whole
script, so that a script with `srun` has a worker per task, and one without has a worker per node.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from penstock.imports.amounts import memory, slurm_time
from penstock.imports.keys import Imported, Note, Notes
from penstock.imports.shell import adapted, uses_srun

DIRECTIVE = re.compile(r"#SBATCH\s+(.*)")
MARK = re.compile(r"^#SBATCH\s", re.MULTILINE)
OTHER_SYSTEMS = re.compile(r"^#(PBS|BSUB|\$|COBALT|OAR)\s+-", re.MULTILINE)
SHORT: Mapping[str, str] = MappingProxyType(
    {
        "A": "account",
        "B": "extra-node-info",
        "C": "constraint",
        "D": "chdir",
        "F": "nodefile",
        "G": "gpus",
        "H": "hold",
        "J": "job-name",
        "L": "licenses",
        "M": "clusters",
        "N": "nodes",
        "O": "overcommit",
        "Q": "quiet",
        "S": "core-spec",
        "W": "wait",
        "a": "array",
        "b": "begin",
        "c": "cpus-per-task",
        "d": "dependency",
        "e": "error",
        "i": "input",
        "k": "no-kill",
        "m": "distribution",
        "n": "ntasks",
        "o": "output",
        "p": "partition",
        "q": "qos",
        "s": "oversubscribe",
        "t": "time",
        "v": "verbose",
        "w": "nodelist",
        "x": "exclude",
    }
)
WITHOUT_VALUE = frozenset(
    (
        "requeue",
        "no-requeue",
        "hold",
        "overcommit",
        "parsable",
        "quiet",
        "verbose",
        "wait",
        "no-kill",
        "contiguous",
        "spread-job",
        "use-min-nodes",
        "test-only",
        "reboot",
        "hetjob",
        "ignore-pbs",
        "wait-all-nodes",
    )
)
NODES = "Penstock chooses nodes and cores, among those that `nodes` allows"
OUTPUT = "`penstock logs JOB` has the output"
IGNORED: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("output", "error", "open-mode"), OUTPUT),
        **dict.fromkeys(
            (
                "partition",
                "clusters",
                "nodefile",
                "distribution",
                "hint",
                "contiguous",
                "switches",
                "cpu-bind",
                "mem-bind",
                "gpu-bind",
                "gres-flags",
                "extra-node-info",
                "core-spec",
                "threads-per-core",
                "sockets-per-node",
                "cores-per-socket",
                "mincpus",
                "spread-job",
                "use-min-nodes",
                "reservation",
                "ntasks-per-socket",
                "ntasks-per-core",
                "cpu-freq",
                "prefer",
                "topology",
            ),
            NODES,
        ),
        **dict.fromkeys(("mail-type", "mail-user"), "follow `penstock events --follow`"),
        **dict.fromkeys(("exclusive", "oversubscribe", "overcommit"), "whole GPUs are exclusive by default"),
        **dict.fromkeys(("account", "wckey"), "the tenant is that of the token; `owner` without tokens"),
        "nodelist": "write `nodes: {only: [NAME, …]}`",
        "exclude": "write `nodes: {exclude: [NAME, …]}`",
        "qos": "`priority` orders your own jobs, and `qos` here is a service class",
        "constraint": "write `gpu_models` for a GPU model, `nodes` for labels of nodes",
        "nice": "`priority` goes from -10 to 10, among your own jobs",
        "priority": "`priority` goes from -10 to 10, among your own jobs",
        "container-mounts": "containers see the job's folder under its own path",
        "licenses": "licences are not counted",
        "tmp": "disks are those of the nodes",
        "input": "read the file in the script",
        "no-requeue": "a job whose node is lost queues again; `retry.max_attempts` is 1 by default, for its "
        "own failures",
        "time-min": "`run_timeout` is one time",
    }
)
"""Options without an equivalent, and without effect on what runs."""
NEEDED: Mapping[str, str] = MappingProxyType(
    {
        "array": "has no equivalent; submit each task: for i in 0 1 2; do penstock submit -e "
        "SLURM_ARRAY_TASK_ID=$i -- SCRIPT; done",
        "dependency": "has no equivalent; wait before: penstock wait JOB && penstock submit …",
        "begin": "has no equivalent; submit then, or hold the job: penstock hold JOB",
        "hold": "has no equivalent; hold the job after its submission: penstock hold JOB",
        "hetjob": "has no equivalent; the parts of a job are alike: submit a job for each",
        "deadline": "has no equivalent as a moment; `deadline` is a time after the submission",
    }
)
"""Options without which the job would do something else."""
SILENT = frozenset(
    (
        "requeue",
        "parsable",
        "quiet",
        "verbose",
        "wait",
        "no-kill",
        "test-only",
        "ignore-pbs",
        "get-user-env",
        "propagate",
        "kill-on-invalid-dep",
        "wait-all-nodes",
        "profile",
        "acctg-freq",
        "bell",
        "no-bell",
        "reboot",
    )
)
"""Options whose meaning holds here in any case, or which only concern sbatch's own command."""
GRES = re.compile(r"(?:gres[/:])?gpu(?::([A-Za-z][\w.+-]*))?(?::([0-9]+))?(?:\(.*\))?")


def is_script(text: str) -> bool:
    """Whether a text has lines for sbatch."""
    return MARK.search(text) is not None


def other_system(text: str) -> str | None:
    """The mark of another batch system's script, such as `#PBS`; None: it has none."""
    found = OTHER_SYSTEMS.search(text)
    return None if found is None or not text.startswith("#!") else f"#{found[1]}"


class Options:
    """The options of a script: name → value, the last one of each counts, as for sbatch."""

    def __init__(self, text: str, notes: Notes) -> None:
        self.found: dict[str, str] = {}
        self.notes = notes
        begun = False
        for line in text.replace("\r\n", "\n").split("\n")[0 if not text.startswith("#!") else 1 :]:
            match = DIRECTIVE.fullmatch(line)
            if match is None:
                begun = begun or bool(line.strip() and not line.lstrip().startswith("#"))
            elif begun:
                notes.append(
                    Note(line.strip()[:48], "stands after the first command, where sbatch does not read it")
                )
            else:
                self._read(match[1])

    def _read(self, text: str) -> None:
        try:
            words = shlex.split(text, comments=True)
        except ValueError:
            self.notes.append(Note(f"#SBATCH {text[:32]}", "cannot be read; correct its quotes", True))
            return
        position = 0
        while position < len(words):
            word = words[position]
            position += 1
            if word == "hetjob":
                self.found["hetjob"] = ""
                continue
            if not word.startswith("-"):
                self.notes.append(Note(f"#SBATCH {word[:32]}", "is no option"))
                continue
            name, mark, value = word.lstrip("-").partition("=")
            if not word.startswith("--"):
                name, value, mark = SHORT.get(word[1:2], word[1:2]), word[2:].lstrip("="), word[2:]
            following = words[position] if position < len(words) else "-"
            if not mark and name not in WITHOUT_VALUE and not following.startswith("-"):
                value, position = following, position + 1
            self.found[name] = value

    def note(self, name: str, text: str, *, needed: bool = False) -> None:
        self.notes.append(Note(f"#SBATCH --{name}", text, needed))

    def take(self, name: str) -> str | None:
        return self.found.pop(name, None)

    def whole(self, name: str) -> int | None:
        """A whole number, the lower end of a range."""
        text = self.take(name)
        if text is None:
            return None
        found = re.fullmatch(r"([0-9]+)(?:-[0-9]+)?", text)
        if found is None or int(found[1]) < 1:
            self.note(name, f"{text[:32]!r} is not a whole number; left out", needed=True)
            return None
        if "-" in text:
            self.note(name, f"{text} is a range; {found[1]} is taken")
        return int(found[1])

    def gpus(self, name: str) -> tuple[int | None, str]:
        """(number of GPUs, model) of `4`, `a100:4`, `gpu:a100:4`; other resources are named."""
        text = self.take(name)
        if text is None:
            return None, ""
        count, model = None, ""
        for part in text.split(","):
            plain = part if name == "gres" else f"gpu:{part}"
            found = GRES.fullmatch(plain)
            if found is None:
                self.note(name, f"{part[:32]} has no equivalent; left out", needed="gpu" in part)
                continue
            count, model = (count or 0) + int(found[2] or 1), found[1] or model
        return count, model


def fields_of(text: str, name: str, notes: Notes, given: Sequence[str] = ()) -> dict[str, Any]:
    """Fields of a job file by the options of a script, without the script itself. `given`: options that
    the submission gives by itself."""
    options = Options(text, notes)
    for one in given:
        options.take(one)
    fields: dict[str, Any] = {"name": options.take("job-name") or name}
    fields |= _shape(options, text)
    fields |= _time(options)
    for option, field in (("chdir", "workdir"), ("container-workdir", "workdir")):
        if (value := options.take(option)) is not None:
            fields[field] = value
    if (image := options.take("container-image")) is not None:
        fields["environment"] = {"container": image.replace("#", "/")}
    if (comment := options.take("comment")) is not None:
        fields["labels"] = {"comment": comment}
    fields |= _signal(options)
    if (export := options.take("export")) is not None:
        fields |= _exported(options, export)
    for option in options.found:
        if option in NEEDED:
            options.note(option, NEEDED[option], needed=True)
        elif option not in SILENT:
            known = IGNORED.get(option)
            shown = f"has no equivalent; {known}" if known else "has no equivalent; left out"
            options.note(option, shown)
    return fields


def _signal(options: Options) -> dict[str, Any]:
    """`grace` of `--signal=B:USR1@120`: here SIGTERM comes before each stop, not before the end of the
    time alone."""
    text = options.take("signal")
    if text is None:
        return {}
    found = re.fullmatch(r"(?:[BR]+:)?(\w+)(?:@([0-9]{1,9}))?", text)
    options.note(
        "signal",
        "each stop sends SIGTERM, and SIGKILL after `grace`; `checkpoint: signal` also sends SIGUSR1",
    )
    return {"grace": f"{min(600, int(found[2] or 60))}s"} if found is not None else {}


def _exported(options: Options, text: str) -> dict[str, Any]:
    """Variables of `--export=ALL,A=1`."""
    env = {}
    for entry in text.split(","):
        name, mark, value = entry.partition("=")
        if mark:
            env[name] = value
        elif name not in ("ALL", "NONE", "NIL"):
            options.note(
                "export", f"{name} is not copied from your shell; give it by -e {name}=…", needed=True
            )
    return {"env": env} if env else {}


def _time(options: Options) -> dict[str, Any]:
    if (text := options.take("time")) is None:
        return {}
    try:
        limit = slurm_time(text)
    except ValueError as error:
        options.note("time", str(error), needed=True)
        return {}
    return {} if limit is None else {"run_timeout": limit}


def _shape(options: Options, script: str) -> dict[str, Any]:
    """Workers, and the resources of each."""
    nodes = options.whole("nodes") or 1
    per_node, per_task_gpu = options.whole("ntasks-per-node"), options.whole("ntasks-per-gpu")
    tasks = options.whole("ntasks") or nodes * (per_node or 1)
    if per_task_gpu is not None:
        options.note(
            "ntasks-per-gpu", "has no equivalent; tasks that share a GPU ask for `gpu_share`", needed=True
        )
    counts = {name: options.gpus(name) for name in ("gres", "gpus-per-node", "gpus", "gpus-per-task")}
    scale: Mapping[str, int] = {"gres": nodes, "gpus-per-node": nodes, "gpus": 1, "gpus-per-task": tasks}
    whole = next((count * scale[name] for name, (count, _) in counts.items() if count), 0)
    models = sorted({model for _, model in counts.values() if model})
    by_task = uses_srun(script)
    workers = tasks if by_task else nodes
    if not by_task and nodes > 1:
        options.note(
            "nodes",
            f"sbatch runs a script without srun on its first node alone; here {nodes} workers run it",
            needed=True,
        )
    found: dict[str, Any] = {"workers": workers} if workers > 1 else {}
    each = -(-whole // workers)
    if whole % workers:
        options.note("gres", f"{whole} GPUs do not divide by {workers} workers; each has {each}", needed=True)
    asked: dict[str, Any] = {"gpus": each}
    per_task = options.whole("cpus-per-task")
    per_gpu = options.whole("cpus-per-gpu")
    if per_task is not None or per_gpu is not None:
        asked["cores"] = (per_gpu or 0) * each or (per_task or 1) * max(1, tasks // workers)
    asked |= _memory(options, nodes=nodes, workers=workers, cores=asked.get("cores", 1), gpus=each)
    return {**found, "resources": asked, **({"gpu_models": models} if models else {})}


def _memory(options: Options, *, nodes: int, workers: int, cores: int, gpus: int) -> dict[str, str]:
    """Main memory of each worker, of `--mem` (a node's), `--mem-per-cpu` or `--mem-per-gpu`."""
    factors: Mapping[str, float] = {"mem": nodes / workers, "mem-per-cpu": cores, "mem-per-gpu": gpus}
    found: dict[str, str] = {}
    for name, factor in factors.items():
        text = options.take(name)
        if text is None or text == "0":  # 0: all of the node's
            continue
        amount = re.fullmatch(r"([0-9]+)([KMGT]?)B?", text, re.IGNORECASE)
        if amount is None:
            options.note(name, f"{text[:32]!r} is not a size; left out", needed=True)
            continue
        size = memory(f"{int(amount[1]) * factor:.6f}{amount[2] or 'M'}", bare_mib=1, binary=True)
        if size is not None:
            found["host_memory"] = size
    return found


def convert(text: str, name: str) -> Imported:
    """A job file with the script in it. `name`: for a script without `--job-name`."""
    notes: Notes = []
    fields = fields_of(text, name, notes)
    fields["script"] = adapted(text, "script", notes)
    return Imported("a script for sbatch", [fields], notes)
