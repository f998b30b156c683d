"""Linux adapter of `ports.Host`, the real machine: state folder, /proc, cgroups, NVML."""

import asyncio
import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from penstock.model.decisions.orders import HandOverCheckpoint, StartTask
from penstock.model.inputs.external_events import CheckpointFetched, GpuFaulted
from penstock.model.jobs.job_parts import Environment
from penstock.model.nouns.nodes import Isolation
from penstock.model.nouns.types import MAX_TEXT
from penstock.runtime import failpoints
from penstock.runtime.files.task_logs import file_name, log_path
from penstock.runtime.keys.node_keys import NodeKeys
from penstock.runtime.keys.signatures import SEED_BYTES
from penstock.sdk.checkpoint import FOLDER as SAVES_VARIABLE
from penstock.sdk.gate import GATE
from penstock.sdk.reporter.lines import FIFO
from penstock.sdk.reporter.savers import SAVERS as SAVERS_VARIABLE
from penstock_services.node_reporter.core.environment import (
    TMP,
    base_environment,
    gang_of,
    peers_json,
    private_places,
    task_environment,
)
from penstock_services.node_reporter.options import Options
from penstock_services.node_reporter.shell.checkpoints import save_requests
from penstock_services.node_reporter.shell.checkpoints.checkpoint_fetch import CheckpointFetcher
from penstock_services.node_reporter.shell.checkpoints.checkpoint_folders import CheckpointFolders
from penstock_services.node_reporter.shell.checkpoints.checkpoint_server import CheckpointServer
from penstock_services.node_reporter.shell.isolation import containers
from penstock_services.node_reporter.shell.isolation.users import (
    check_reach,
    find_task_user,
    own_name,
)
from penstock_services.node_reporter.shell.journal import Journal, JournalFailed
from penstock_services.node_reporter.shell.limits.bandwidth_caps import BandwidthCaps
from penstock_services.node_reporter.shell.limits.cgroups import Cgroups
from penstock_services.node_reporter.shell.limits.confinement_choice import confine
from penstock_services.node_reporter.shell.limits.pinning import pin, real_cores
from penstock_services.node_reporter.shell.logs.archiver import Archiver
from penstock_services.node_reporter.shell.measure.faults import watch_faults
from penstock_services.node_reporter.shell.measure.fifo import HeldFifos
from penstock_services.node_reporter.shell.measure.inventory import find_node, gpu_minors, mps_runs
from penstock_services.node_reporter.shell.measure.meters import LinuxMeters
from penstock_services.node_reporter.shell.measure.resctrl_monitor import TrafficMonitor
from penstock_services.node_reporter.shell.ports import (
    Callbacks,
    Enforced,
    Exit,
    Key,
    NotStartable,
    ProgressStream,
    Started,
)
from penstock_services.node_reporter.shell.process import processes
from penstock_services.node_reporter.shell.process.records import read_record
from penstock_services.node_reporter.shell.process.savers import SAVERS, savers
from penstock_services.node_reporter.shell.process.spawner import Spawner, lock_state
from penstock_services.node_reporter.shell.process.task_folders import PHASES, WORK, TaskFolders
from penstock_services.node_reporter.shell.sessions.commands import Commands
from penstock_services.node_reporter.shell.state_folder import make_folder, outermost, state_folder
from penstock_services.node_reporter.shell.task_setup.code import remove_unchanged
from penstock_services.node_reporter.shell.task_setup.code_cache import CodeCache
from penstock_services.node_reporter.shell.task_setup.gang_files import PEERS, PEERS_FILE, GangFiles
from penstock_services.node_reporter.shell.task_setup.gateway_access import GatewayAccess
from penstock_services.node_reporter.shell.task_setup.group_folders import GroupFolders
from penstock_services.node_reporter.shell.task_setup.programs import conda_folders, own_environment
from penstock_services.node_reporter.shell.task_setup.secrets import Secrets

CODE = "code.tar.gz"
GATE_FILE = "gate"
MS_PER_S = 1_000
DEFAULT_TERM = "xterm"  # of a job that names none
KEY_FILE = "node.key"  # in the state folder: the seed of the node's keys

logger = logging.getLogger(__name__)


class LinuxHost:
    """This machine under these options. Raises `ConfigurationError` naming the option that does not fit.

    `own_process`: the reporter is alone in its process, which may be killed when it hangs.
    """

    def __init__(self, options: Options, *, own_process: bool = False) -> None:
        self.options = options
        self._own_process = own_process
        self._user = find_task_user(options.task_user, allow_root=options.allow_root)
        if self._user is not None:
            check_reach(self._user, options.state_dir)
        own = sha256(str(options.state_dir).encode()).hexdigest()[:8]
        self._cgroups = Cgroups(f"{file_name(options.node_id)}-{own}", options.cgroup)
        self._traffic = TrafficMonitor(self._cgroups.name)
        self.meters = LinuxMeters(
            self._cgroups,
            self._traffic,
            virtual=options.virtual_gpus is not None,
            memory_mb_s=options.memory_bandwidth_mb_s,
        )
        self._confinement, why = confine(options.isolation, self._cgroups, self._user)
        self._protected = self._confinement.mounts or self._user is not None
        self._caps = BandwidthCaps(self._cgroups, options.memory_bandwidth_mb_s, protected=self._protected)
        spec = find_node(options)
        if options.virtual_gpus is None:
            self._cgroups.gpu_minors = gpu_minors(spec.gpus)
        self._apart = self._protected and self._cgroups.keeps_devices  # a task can open no GPU but its own
        self.spec = msgspec.structs.replace(
            spec, isolation=self._isolation(why), measures=self.meters.measures
        )
        self._checkpoints = CheckpointFolders(options, self._user)
        self._fetcher = CheckpointFetcher(options, self._checkpoints, self.keys)
        self._handovers: Mapping[str, HandOverCheckpoint] = {}
        self._code = CodeCache(options, options.state_dir / "code")
        self._secrets = Secrets(options.secrets_dir, os.environ)
        self._access = GatewayAccess(options, self.keys)
        self.locked = asyncio.Event()
        """Set when no start of an earlier reporter is under way."""
        self.archiver: Archiver | None = None
        """Set before the first task starts."""
        self._fifos = HeldFifos()
        self._folders = TaskFolders(options.state_dir)
        self._gangs = GangFiles(options.state_dir / "gangs")
        self._groups = GroupFolders(options.state_dir / "groups", self._user)
        self._marks = {"PENSTOCK_NODE_ID": options.node_id, "PENSTOCK_STATE_DIR": str(options.state_dir)}
        """Environment variables that mark this reporter's processes."""
        self._base = base_environment(os.environ, own_environment(os.environ)) | self._marks
        if self._user is not None:
            self._base |= self._user.environment()
        if self._confinement.mounts:
            self._base["TMPDIR"] = TMP

    def _isolation(self, why: str) -> Isolation:
        """The enforced isolation. A task of the same user that can write to the cgroups' files is confined by
        none of them."""
        groups, plan = self._cgroups, self._confinement
        return Isolation(
            exits=plan.exits,
            files=plan.mounts,
            reason=why[:MAX_TEXT],
            memory="task" if groups.caps_memory else "process",
            cores="cpuset" if self._protected and groups.keeps_cores else "affinity",
            devices="cgroup" if self._apart else "hint",
            bandwidth=self._caps.mechanism,
            user=self._user.name if self._user is not None else own_name(),
            tmp="task" if plan.mounts else "node",
            processes="limited" if groups.limits_processes else "unlimited",
        )

    # ------------------------------------------------------------------------------- state folder

    async def lock(self) -> int:
        make_folder(self.options.state_dir)
        lock = await lock_state(self.options.state_dir)
        self.locked.set()
        return lock

    def unlock(self, lock: int) -> None:
        os.close(lock)

    def open_journal(self) -> Journal:
        return Journal(self.options.state_dir / "journal.sqlite")

    def keys(self) -> NodeKeys:
        path = self.options.state_dir / KEY_FILE
        try:
            if not path.exists():
                _write_secret(path, os.urandom(SEED_BYTES))
            return NodeKeys(path.read_bytes())
        except (OSError, ValueError) as error:
            raise JournalFailed(f"{path}: the node's key cannot be used: {error}") from error

    @property
    def _lease(self) -> Path:
        """File with the contact for launcher and shims, which take no queries; with the boot of its clock,
        and the longest lease."""
        return self.options.state_dir / "lease"

    def contact(self) -> float | None:
        try:
            contact_s, boot_id, *_ = self._lease.read_text().split()
            return float(contact_s) if boot_id == self.spec.boot_id else None
        except (OSError, ValueError):
            return None

    def renew(self, contact_s: float, lease_s: float) -> None:
        new = self._lease.with_name(".lease")
        with state_folder():
            new.write_text(f"{contact_s} {self.spec.boot_id} {lease_s}")
            new.replace(self._lease)

    def _folder(self, key: Key) -> Path:
        """Folder in which a task's shim records its start and end."""
        return self.options.state_dir / "tasks" / f"{file_name(key[0])}@{key[1]}"

    def started(self, key: Key) -> Started | None:
        found = read_record(self._folder(key) / "started.json", Started)
        return found if found is not None and (found.task_id, found.token) == key else None

    def exit(self, key: Key) -> Exit | None:
        self._fifos.release(key)
        found = read_record(self._folder(key) / "exit.json", Exit)
        if found is not None:
            self._groups.leave(folder := self._folder(key))
            asyncio.get_running_loop().run_in_executor(None, self._remove_watched, key)
            self._caps.sweep()
            self._traffic.sweep()
            if self.archiver is not None:
                self.archiver.ended(*key)
            if (folder / CODE).exists():
                asyncio.get_running_loop().run_in_executor(None, self._remove_code, folder, found)
        return found

    def _remove_watched(self, key: Key) -> None:
        """In a thread."""
        if (started := self.started(key)) is not None:
            self._cgroups.remove_watched(started.groups)

    def forget(self, key: Key) -> None:
        """Files that the task itself wrote into its working folder stay."""
        folder = self._folder(key)
        self._groups.leave(folder)
        self._gangs.forget(key, folder)
        self._access.forget(folder)
        with suppress(OSError):
            (folder / WORK).rmdir()
        if not (folder / WORK).exists():
            shutil.rmtree(folder, ignore_errors=True)

    def has_ended(self, name: str) -> bool:
        """Whether the task with this folder under `tasks/` is proven to have ended."""
        started = read_record(self.options.state_dir / "tasks" / name / "started.json", Started)
        return started is None or not processes.is_alive(started.shim, started.shim_start)

    # ------------------------------------------------------------------------------------- tasks

    def launch(self, lock: int, callbacks: Callbacks) -> Spawner:
        tasks = make_folder(self.options.state_dir / "tasks")
        with state_folder():
            self._checkpoints.make()
            members = self._groups.prepare(hidden=self._confinement.mounts)
        with suppress(JournalFailed):  # tasks go without logs
            make_folder(self.options.log_dir)
        given = self.options
        folders = (given.state_dir, given.log_dir, given.secrets_dir, given.code_dir, *(given.hide or ()))
        hidden = outermost(folder for folder in folders if folder is not None and folder.is_dir())
        self._cgroups.sweep()
        self._folders.prepare()
        self._caps.sweep()
        self._traffic.sweep()
        plan = self._confinement._replace(
            tasks=str(tasks),
            checkpoints=self._checkpoints.hidden(hidden if self._confinement.mounts else ()),
            members=members,
            hidden=[str(folder) for folder in hidden],
            name=self._cgroups.name,
            groups=self._cgroups.plan(),
            watched=self._cgroups.watched,
        )
        contact = self._lease if self._own_process else None
        return Spawner(lock, self._marks, plan, callbacks, self.request, contact)

    def request(self, order: StartTask, until_s: float | None, *, gated: bool) -> dict[str, Any]:
        """The launcher's request for a task, whose folder is created. `gated`: it has no GPU yet. Raises
        `SecretMissing`, `JournalFailed`."""
        options, secrets = self.options, self._secrets.resolve(order.secrets, order.owner)
        folder = self._folder((order.task_id, order.token))
        work = None if order.workdir and order.code is None else folder / WORK
        with state_folder():
            self._folders.create(folder, work=work is not None)
            group = self._groups.join(order, folder)
            failpoints.hit("node.folder_made")
            if self.archiver is not None:
                self.archiver.starting(order.job_id, order.task_id, order.token)
        self._fifos.hold((order.task_id, order.token), folder / PHASES)
        gate = folder / GATE_FILE
        if gated:
            with state_folder():
                gate.touch(mode=0o600)
        access, files = self._access.give(order, folder, order.env.get("PATH", self._base["PATH"]))
        own = [folder / PHASES, folder / SAVERS, *files]
        own += [*([] if work is None else [work]), *([gate] if gated else [])]
        self._give(folder, own)
        peers = self._gangs.peers((order.task_id, order.token), peers_json(gang_of(order, self.spec)), folder)
        visible = [*(path.name for path in own), *([PEERS] if PEERS_FILE in peers else [])]
        if order.code is not None:
            self._link_code(order.code, folder)
            visible.append(CODE)
        virtual, uid = options.virtual_gpus is not None, os.geteuid()
        user = (uid, os.getegid()) if self._user is None else (self._user.uid, self._user.gid)
        runtime = containers.runtime_of(order, self._base["PATH"], root=self._user is None and uid == 0)
        apart = self._apart if runtime is None else runtime.name == containers.PODMAN or self._apart
        variables = task_environment(
            order, self.spec, self._base, peers, virtual=virtual, mps=mps_runs(), apart=apart
        )
        gpus = () if virtual else order.gpu_uuids
        saves = self._checkpoints.environment(order, folder)
        meets = self._groups.environment(group, folder)
        env = secrets | variables | {FIFO: str(folder / PHASES)} | saves | meets
        if order.interactive:
            env = {"TERM": DEFAULT_TERM} | env
        env |= {SAVERS_VARIABLE: str(folder / SAVERS)} | ({GATE: str(gate)} if gated else {}) | access
        cwd = str(order.workdir if work is None else work / (order.workdir or ""))
        shown = [str(folder / name) for name in visible if name != CODE]
        shown += [*([saves[SAVES_VARIABLE]] if saves else []), *meets.values()]
        return {
            "task_id": order.task_id,
            "token": order.token,
            "folder": str(folder),
            "log": str(log_path(options.log_dir, order.job_id, order.task_id)),
            "log_limit": options.log_limit_mib << 20,
            "argv": containers.argv(order, runtime, cwd, shown, env.keys() - self._base.keys(), gpus, user),
            "env": env,
            "cwd": cwd,
            "code": None if order.code is None else [str(folder / CODE), order.code, str(work)],
            "programs": _programs(order.environment),
            "visible": visible,
            "checkpoints": self._checkpoints.bound(order),
            "group": self._groups.bound(group),
            "private": private_places(order) if self._confinement.mounts else {},
            "gate": str(gate) if gated else None,
            "interactive": order.interactive,
            **self._cgroups.request(
                order.place, real_cores(order.place.cores), () if gated else order.gpu_uuids
            ),
            "cores": real_cores(order.place.cores),
            "lease": None
            if until_s is None
            else {"path": str(self._lease), "lease_s": order.lease_ms / MS_PER_S, "until_s": until_s},
        }

    async def fetch(self, order: StartTask) -> CheckpointFetched | None:
        if order.code is not None:
            await self._code.fetch(order)
        found = None
        if order.checkpoint and order.checkpoint_from is not None:
            found = await self._fetcher.fetch(order, order.checkpoint_from)
        if order.checkpoint is not None:
            await asyncio.to_thread(self._checkpoints.prepare, order)
        return found

    def hand_over(self, orders: Mapping[str, HandOverCheckpoint]) -> None:
        self._handovers = orders

    def checkpoint_server(self) -> CheckpointServer:
        return CheckpointServer(self.options.node_id, self._checkpoints, lambda: self._handovers, self.keys)

    def commands(self) -> Commands:
        return Commands(self._confinement, self.started, self._folder)

    def checkpoints(self, order: StartTask) -> str:
        return "" if order.checkpoint is None else str(self._checkpoints.of(order.job_id))

    def discard(self, order: StartTask) -> None:
        self._checkpoints.discard(order.job_id)

    def _link_code(self, digest: str, folder: Path) -> None:
        """A hard link of the task's own, so that the cache may evict the archive. Raises `NotStartable`."""
        try:
            with suppress(FileExistsError):
                (folder / CODE).hardlink_to(self._code.path(digest))
        except OSError as error:
            raise NotStartable(
                f"its code is not on this node any more: {error.strerror}; submit it again"
            ) from error

    @staticmethod
    def _remove_code(folder: Path, found: Exit) -> None:
        """Removes code that the task has not changed. In a thread: it may be many files."""
        cut_short = found.failure is not None and found.failure.stage == "code"
        with suppress(OSError, RecursionError):
            remove_unchanged(str(folder / WORK), None if cut_short else found.unpacked_ns)
            (folder / CODE).unlink()

    def _give(self, folder: Path, paths: Sequence[Path]) -> None:
        """Gives these paths of a task's folder to its user; without mounts of its own the task must be able
        to pass through to them."""
        if self._user is None:
            return
        with state_folder():
            for path in paths:
                os.chown(path, self._user.uid, self._user.gid)
            if not self._confinement.mounts:
                for parent in (folder, folder.parent, self.options.state_dir):
                    parent.chmod(0o711)

    def end_task(self, key: Key) -> int:
        count = self._end_task(key)
        if self.archiver is not None:
            self.archiver.ended(*key)
        return count

    def _end_task(self, key: Key) -> int:
        started = self.started(key)
        in_groups = self._cgroups.end(() if started is None else started.groups)
        if started is not None and started.exits == "pid_namespace":
            return 0  # the kernel ended all of its processes with the shim
        session = started.pid if started is not None else None
        own = {**self._marks, "PENSTOCK_TASK_ID": key[0], "PENSTOCK_TOKEN": str(key[1])}
        found = lambda: processes.with_descendants(processes.members(own, session), set())  # noqa: E731
        return in_groups + processes.kill_all(found)

    def end_orphans(self, known: set[int]) -> int:
        spare = known | processes.ancestors(os.getpid())
        return processes.kill_all(
            lambda: processes.with_descendants(
                {pid for pid in processes.members(self._marks) if known.isdisjoint(processes.ancestors(pid))},
                spare,
            )
        )

    def ask_to_save(self, key: Key, *, by_sdk: bool) -> bool:
        started = self._alive(key)
        return started is not None and save_requests.ask_to_save(started, self._folder(key), by_sdk=by_sdk)

    def saves(self, key: Key) -> bool:
        started = self._alive(key)
        return started is None or bool(savers(str(self._folder(key) / SAVERS)).saving)

    def progress(self, key: Key) -> ProgressStream | None:
        return self._fifos.take(key, self._folder(key) / PHASES)

    def _alive(self, key: Key) -> Started | None:
        started = self.started(key)
        alive = started is not None and processes.is_alive(started.shim, started.shim_start)
        return started if alive else None

    def set_affinity(self, key: Key, cores: Sequence[int], cap_percent: int | None) -> Enforced | None:
        """The group first: it bounds the possible affinities."""
        if (started := self._alive(key)) is None:
            return None
        try:
            self._cgroups.set_cores(started.groups, real_cores(cores))
        except OSError as error:
            return Enforced("", f"its cpuset: {error.strerror}") if self._alive(key) else None
        wrong = pin(started.shim, real_cores(cores))
        wrong = wrong or self._caps.cores_changed(self._folder(key).name, started, cap_percent)
        isolation = self.spec.isolation
        mechanism = "affinity" if isolation is None else isolation.cores
        return Enforced("" if wrong else mechanism, wrong)

    def allow_gpus(self, key: Key, uuids: Sequence[str]) -> None:
        if (started := self._alive(key)) is not None:
            self._cgroups.allow_gpus(started.groups, uuids)

    def cap_bandwidth(self, key: Key, percent: int | None) -> Enforced | None:
        if (started := self._alive(key)) is None:
            return None
        return self._caps.cap(self._folder(key).name, started, percent)

    def watch_gpus(self, deliver: Callable[[GpuFaulted], None]) -> None:
        if self.options.virtual_gpus is None and self.spec.gpus:
            watch_faults(self.spec.node_id, self.spec.gpus, deliver)


def _programs(environment: Environment | None) -> tuple[str, str, list[str]] | None:
    """Arguments of `programs.enter`; None: the node's own PATH."""
    if environment is None or environment.container is not None:
        return None
    kind, where = ("venv", environment.venv) if environment.venv else ("conda", environment.conda)
    return kind, where or "", conda_folders(os.environ)


def _write_secret(path: Path, data: bytes) -> None:
    """Whole or not at all, synced to the disk, and readable for the reporter's user alone. Raises OSError."""
    temporary = path.with_suffix(".new")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
