"""Scripts of hostile jobs for `/usr/bin/python3`, each bounded in processes and bytes; none goes on for ever.

A script prints `GOT what` when it got what it must not have. What it cannot know itself is judged from
outside.
"""

import os

LONG_S = 1_800
"""A job or a process that the node or the test ends; by itself it ends after so long."""
SLEEP_S = f"{LONG_S}.{os.getpid():07}"
"""Of an escaped process: by this odd number the judge of this test process knows it."""
CANARY_HALVES = ("planted-", "credential")
"""Halves, so that a script that searches for it does not find itself."""

PRELUDE = """
import ctypes, fcntl, glob, json, mmap, os, resource, signal, socket, sys, time
libc = ctypes.CDLL(None, use_errno=True)
STATE, BYSTANDER, OUTSIDE, SLEEP = {state!r}, {bystander}, {outside!r}, "{sleep}"
CANARY = {canary!r}[0].encode() + {canary!r}[1].encode()
KEY = os.environ["PENSTOCK_TASK_ID"] + "@" + os.environ["PENSTOCK_TOKEN"]
CONFINED = open("/proc/1/comm").read().strip() == "penstock-shim"
RECORD = json.dumps(dict(
    task_id=os.environ["PENSTOCK_TASK_ID"], token=int(os.environ["PENSTOCK_TOKEN"]),
    started_ms=1, exited_ms=2, exit_code=0, signal=None, cpu_ms=0, max_rss_kib=0))
def got(what): print("GOT", what, flush=True)
def attempt(what, action, *arguments):
    try: action(*arguments)
    except (OSError, ValueError): return False
    got(what)
    return True
def call(name, *arguments):
    if getattr(libc, name)(*arguments) < 0: raise OSError(ctypes.get_errno(), name)
def sleeper(): os.execve("/bin/sleep", ["sleep", SLEEP], {{}})
def escape():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.closerange(0, 256)
            sleeper()
        os._exit(0)
    os.wait()
def find(paths):
    for path in paths:
        try:
            with open(path, "rb") as file:
                if CANARY in file.read(1 << 20): got("the canary from " + path)
        except OSError: pass
def write(path, text):
    with open(path, "w") as file: file.write(text)
"""

ATTACKS: dict[str, str] = {
    # ------------------------------------------------------------------------------------ to outlive the task
    "double fork, empty environment": "escape(); sys.exit(3)",
    "subreaper of its own": "call('prctl', 36, 1, 0, 0, 0); escape(); sys.exit(3)",
    "sibling by CLONE_PARENT": """
if libc.syscall(56, 0x8000 | signal.SIGCHLD, 0, 0, 0, 0) == 0: sleeper()
sys.exit(3)
""",
    "nested namespaces": """
if libc.unshare(0x30000000) == 0 and os.fork() == 0:
    escape(); sleeper()
sys.exit(3)
""",
    "child that ignores every signal": """
if os.fork() == 0:
    for number in range(1, 65):
        try: signal.signal(number, signal.SIG_IGN)
        except (OSError, ValueError): pass
    os.setsid(); sleeper()
sys.exit(3)
""",
    "stopped child": """
pid = os.fork()
if pid == 0: sleeper()
os.kill(pid, signal.SIGSTOP)
sys.exit(3)
""",
    "traced child": """
pid = os.fork()
if pid == 0:
    call('ptrace', 0, 0, 0, 0); os.kill(os.getpid(), signal.SIGSTOP); sleeper()
sys.exit(3)
""",
    "fork bomb of 200": """
for _ in range(200):
    try:
        if os.fork() == 0: os.setsid(); sleeper()
    except OSError: break
sys.exit(3)
""",
    "forks while it dies": """
def again(depth):
    while depth:
        depth -= 1
        if os.fork(): time.sleep(0.002); os._exit(0)
    sleeper()
if os.fork() == 0: os.setsid(); again(150)
sys.exit(3)
""",
    "the namespaces of init": "attempt('a namespace', lambda: call('setns', "
    "os.open(f'/proc/{BYSTANDER}/ns/pid', 0), 0)); escape(); sys.exit(3)",
    # ------------------------------------------------------------------------------------------ to forge
    # records
    "exit record beside its folder": "attempt('the record', write, '../exit.json', RECORD); sys.exit(3)",
    "exit record by its path": "attempt('the record', write, f'{STATE}/tasks/{KEY}/exit.json', RECORD); "
    "sys.exit(3)",
    "exit record by a link": """
try: os.symlink(os.path.abspath("mine"), f"{STATE}/tasks/{KEY}/exit.json")
except OSError: sys.exit(3)
write("mine", RECORD); got("the record"); sys.exit(3)
""",
    "exit record under the mount": """
for _ in range(3):
    libc.umount2(STATE.encode(), 2)
    libc.umount2(os.getcwd().encode(), 2)
attempt('the record', write, f'{STATE}/tasks/{KEY}/exit.json', RECORD); sys.exit(3)
""",
    "exit record through other roots": """
pids = [name for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]
for pid in pids + [str(BYSTANDER)]:
    for way in ("root", "cwd"):
        attempt('the record', write, f'/proc/{pid}/{way}{STATE}/tasks/{KEY}/exit.json', RECORD)
sys.exit(3)
""",
    "exit record in new mounts": """
if libc.unshare(0x10020000): sys.exit(3)
libc.umount2(STATE.encode(), 2)
libc.mount(b"proc", b"/proc", b"proc", 0, None)
attempt('the record', write, f'{STATE}/tasks/{KEY}/exit.json', RECORD); sys.exit(3)
""",
    "another task's folder": """
for folder in glob.glob(f"{STATE}/tasks/*"):
    if os.path.basename(folder) != KEY: got("the name of " + folder)
sys.exit(3)
""",
    "its working folder turned into a link": """
here = os.getcwd(); os.chdir("/")
try: os.rmdir(here); os.symlink(OUTSIDE, here)
except OSError: sys.exit(3)
got("a link for its folder"); sys.exit(3)
""",
    "its FIFO replaced": """
path = os.environ["PENSTOCK_PHASE_FILE"]
attempt("its FIFO", os.unlink, path); sys.exit(3)
""",
    # --------------------------------------------------------------------------------------- to read
    # credentials
    "environments of others": "find(glob.glob('/proc/[0-9]*/environ') + [f'/proc/{BYSTANDER}/environ']); "
    "sys.exit(3)",
    "the reporter's files": "find([f'{STATE}/secret', f'{STATE}/journal.sqlite', "
    "f'{STATE}/journal.sqlite-wal']); sys.exit(3)",
    "leaked descriptors": """
for name in os.listdir("/proc/self/fd"):
    if int(name) > 2:
        try: target = os.readlink("/proc/self/fd/" + name)
        except OSError: continue
        if not target.startswith("/proc/"): got("a descriptor of " + target)
sys.exit(3)
""",
    "the reporter's keyring": """
found = ctypes.create_string_buffer(64)
key = libc.syscall(250, 10, -3, b"user", b"planted", 0)  # KEYCTL_SEARCH, then KEYCTL_READ
if key > 0 and libc.syscall(250, 11, key, found, 64) > 0 and CANARY in found.raw:
    got("the canary from a keyring")
sys.exit(3)
""",
    "memory of the shim": """
for pid in (1, os.getppid(), BYSTANDER):
    attempt(f"the memory of {pid}", lambda: os.close(os.open(f"/proc/{pid}/mem", os.O_RDWR)))
sys.exit(3)
""",
    "ptrace of the shim": """
for pid in (os.getppid(), BYSTANDER):
    if libc.ptrace(16, pid, 0, 0) == 0: got(f"hold of {pid}"); libc.ptrace(17, pid, 0, 0)
sys.exit(3)
""",
    "processes of others": """
pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
if len(pids) > 5 or BYSTANDER in pids: got(f"{len(pids)} process ids")
sys.exit(3)
""",
    "files by handle": """
class Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_uint), ("type", ctypes.c_int), ("data", ctypes.c_char * 8)]
handle = Handle(8, 1, b"\\x02")
attempt("a file handle", call, "open_by_handle_at", os.open("/", 0), ctypes.byref(handle), 0); sys.exit(3)
""",
    # ------------------------------------------------------------------------------------------- to signal
    # others
    "SIGKILL to its shim": """
try: os.kill(os.getppid(), 9) if CONFINED else None
except PermissionError: pass
time.sleep(0.1); sys.exit(3)
""",
    "every deadly signal to its shim": """
for number in (signal.SIGSTOP, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGSEGV, signal.SIGALRM):
    try: os.kill(os.getppid(), number) if CONFINED else None
    except PermissionError: pass
time.sleep(0.1); sys.exit(3)
""",
    "SIGKILL to everybody": """
try: os.kill(-1, 9) if CONFINED else None
except ProcessLookupError: pass
time.sleep(0.1); sys.exit(3)
""",
    "SIGKILL to a bystander": "attempt('a signal through', os.kill, BYSTANDER, 0); sys.exit(3)",
    # ------------------------------------------------------------------------------------------ to change the
    # node
    "a mount": "attempt('a mount', call, 'mount', b'none', b'/mnt', b'tmpfs', 0, b'size=4k') and "
    "libc.umount(b'/mnt'); sys.exit(3)",
    "a device node": "attempt('a device', os.mknod, 'disk', 0o60600, os.makedev(254, 0)); sys.exit(3)",
    "raw disks": """
for name in os.listdir("/sys/block"):
    attempt("the disk " + name, lambda name=name: open("/dev/" + name, "rb").read(1))
sys.exit(3)
""",
    "more cores": """
before = os.sched_getaffinity(0)
os.sched_setaffinity(0, range(64))
if os.sched_getaffinity(0) != before: got("other cores")
sys.exit(3)
""",
    "kernel settings": """
path = "/proc/sys/kernel/core_pattern"; same = open(path).read()
attempt("a kernel setting", write, path, same); sys.exit(3)
""",
    "the machine's name": "attempt('the name', socket.sethostname, socket.gethostname()); sys.exit(3)",
    "the machine's clock": "attempt('the clock', time.clock_settime, time.CLOCK_REALTIME, time.time()); "
    "sys.exit(3)",
    "real-time priority": "attempt('priority', os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(1)); "
    "sys.exit(3)",
    "safe from the OOM killer": "attempt('safety', write, '/proc/self/oom_score_adj', '-1000'); sys.exit(3)",
    "another cgroup": """
for path in glob.glob("/sys/fs/cgroup/*/cgroup.procs") + glob.glob("/sys/fs/cgroup/cgroup.procs"):
    attempt("into " + path, write, path, str(os.getpid()))
sys.exit(3)
""",
    "a larger memory cap": """
for path in glob.glob(f"/sys/fs/cgroup/memory/**/*@{KEY}/memory.limit_in_bytes", recursive=True):
    attempt("its cap", write, path, "-1")
sys.exit(3)
""",
    "a setuid program": """
if os.getuid() and os.path.exists(OUTSIDE + "/id") and " euid=0" in os.popen(OUTSIDE + "/id").read():
    got("root")
sys.exit(3)
""",
    # ----------------------------------------------------------------------------------------------- to fill
    # things
    "3 MiB of output": "[os.write(1, b'#' * 65_536) for _ in range(48)]; sys.exit(3)",
    "its FIFO full": """
fifo = os.open(os.environ["PENSTOCK_PHASE_FILE"], os.O_WRONLY | os.O_NONBLOCK)
for _ in range(200):
    try: os.write(fifo, b"x" * 4_000)
    except BlockingIOError: break
sys.exit(3)
""",
    "the hidden folder full": """
for number in range(200):
    try: write(f"{STATE}/{number}", "x" * 4_096)
    except OSError: break
    got("room in the state folder")
    if number > 3: break
sys.exit(3)
""",
    "its small disk full": """
try:
    with open("full", "wb") as file:
        for _ in range(64): file.write(b"x" * 65_536)
except OSError: pass
sys.exit(3)
""",
    "SIGTERM ignored": "signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); time.sleep(1800)",
}
