"""What people put in front of a training: job scripts, pipes, launchers. Each runs in `bash -c`."""

import sys
from pathlib import Path

FORWARDS = """
import os, signal, subprocess, sys
ranks = [subprocess.Popen(sys.argv[1:], env={**os.environ, "RANK": str(rank)}) for rank in range(2)]
signal.signal(signal.SIGTERM, lambda *_: [rank.send_signal(signal.SIGTERM) for rank in ranks])
ranks[0].wait()
for rank in ranks:
    rank.send_signal(signal.SIGTERM)
sys.exit(max(rank.wait() for rank in ranks))
"""
LAUNCHES = "import subprocess, sys; sys.exit(subprocess.run(sys.argv[1:]).returncode)"
WRAPPERS = {
    "direct": "exec {train}",
    "run.sh": "echo begins\n{train}\necho ended with $?",
    "trapped": "trap 'kill -TERM $child; wait $child' TERM\n{train} & child=$!\nwait $child",
    "deaf": "trap '' TERM\n{train}\ntrue",
    "sh -c": "sh -c '{train}; true'",
    "tee": "{train} 2>&1 | tee {log}",
    "nohup": "nohup setsid {train} &\nwait",
    "torchrun": "{python} -c '{forwards}' {train}",
    "accelerate": "{python} -c '{launches}' {train}",
}
"""Name → the job's script, with places for `wrapped`. The real launchers:
`tests/e2e/trainings/test_launcher_stops.py`."""


def wrapped(name: str, train: str, folder: Path) -> str:
    """The script of this name, with this command behind it; `tee` writes `train.log` in the folder."""
    fields = {
        "python": sys.executable,
        "forwards": FORWARDS,
        "launches": LAUNCHES,
        "log": folder / "train.log",
    }
    return WRAPPERS[name].format(train=train, **fields)
