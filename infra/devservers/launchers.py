"""Real launchers and frameworks of training on a CPU: PyTorch with `torchrun`, Lightning, Accelerate,
Transformers, DeepSpeed.

PyTorch is Debian's package, whose build has no CUDA: 150 MB with all that it needs, where the wheel of PyPI
pulls 3.2 GB of CUDA's libraries. It is unpacked, not installed. The frameworks that fit it come from
`infra/launchers/requirements.lock`. None of DeepSpeed's operators is compiled.
"""

import shutil
import sys
from pathlib import Path

from infra.devservers.build_cache import INFRA, Part, obtain
from infra.devservers.processes import run_to_end

LOCK = INFRA / "launchers" / "requirements.lock"
PACKAGE, VERSION = "python3-torch", "1.13.1"
TRIPLET = "x86_64-linux-gnu"
LIBRARIES = [
    f"lib/{TRIPLET}",
    "usr/lib",
    *(f"usr/lib/{TRIPLET}/{place}" for place in ("", "blas", "lapack", "pulseaudio")),
]
PACKAGES = "usr/lib/python3/dist-packages"
PYTHON = Path("/usr/bin/python3")
"""Debian's own, for which its PyTorch is built."""
PATCHES = (
    (
        f"{PACKAGES}/torch/distributed/_shard/sharded_tensor/metadata.py",
        "field(default=TensorProperties())",
        "field(default_factory=TensorProperties)",
    ),
    (
        f"{PACKAGES}/torch/distributed/elastic/multiprocessing/api.py",
        "for s in Std:",
        "for s in Std.__members__.values():",
    ),
    ("site/deepspeed/comm/torch.py", "self.shm_comm_op = build_shm_op()", "self.shm_comm_op = None"),
)
"""(file, its text, what is written instead). PyTorch 1.13 is older than Debian 12's Python 3.11, which
refuses the first and finds no zero in the second: PyTorch 2.0 has what is written. DeepSpeed on a CPU would
compile an operator of its own for gangs on one node, where gloo does the same."""
REMEDY = "Debian 12 has it"
BUILD_TIMEOUT_S = 900.0


def obtain_launchers() -> Path:
    """Folder of the frameworks, or the virtual environment that `PENSTOCK_LAUNCHERS` names. Raises
    `LaunchError` with the remedy."""
    return obtain(
        Part(
            name="launchers",
            version=VERSION,
            pins=(LOCK,),
            needs=(("apt-get", REMEDY), ("dpkg-deb", REMEDY), (str(PYTHON), REMEDY)),
            expected="1 to 2 minutes",
            override="PENSTOCK_LAUNCHERS",
            build=_build,
        )
    )


def environment() -> dict[str, str]:
    """PATH with `python`, `torchrun`, `accelerate` and `deepspeed`, and what these need beside it. Raises
    `LaunchError`."""
    folder = obtain_launchers()
    path = f"{folder / 'bin'}:/usr/bin:/bin"
    if (folder / "pyvenv.cfg").exists():
        return {"PATH": path}
    return {
        "PATH": path,
        "PYTHONPATH": f"{folder / 'site'}:{folder / PACKAGES}",
        "LD_LIBRARY_PATH": ":".join(str(folder / place) for place in LIBRARIES),
    }


def _build(folder: Path) -> None:
    """Downloads what this machine lacks of the package's dependencies, with lists and archives of its own,
    so that it needs no rights."""
    lists, archives, log = folder / "lists", folder / "archives", folder / "build.log"
    for place in (lists, archives):
        (place / "partial").mkdir(parents=True)
    settings = {
        "Dir::State::lists": lists,
        "Dir::Cache": folder,
        "Dir::Cache::archives": archives,
        "Debug::NoLocking": "1",
        "APT::Sandbox::User": "",
        "APT::Install-Recommends": "0",
    }
    apt = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in settings.items())]
    download = [*apt, "install", "--download-only", "--yes", PACKAGE]
    for name, argv in (("apt-get update", [*apt, "update"]), ("apt-get install", download)):
        run_to_end(name, argv, log_path=log, timeout_s=BUILD_TIMEOUT_S)
    for archive in sorted(archives.glob("*.deb")):
        run_to_end("dpkg-deb", ["dpkg-deb", "-x", str(archive), str(folder)], log_path=log)
    for left in (lists, archives, folder / "usr" / "share"):
        shutil.rmtree(left, ignore_errors=True)
    uv = [str(Path(sys.executable).with_name("uv")), "pip", "install", "--python", str(PYTHON)]
    locked = ["--require-hashes", "--no-deps", "-r", str(LOCK), "--build-constraints", str(LOCK)]
    argv = ["env", "DS_BUILD_OPS=0", *uv, "--target", str(folder / "site"), *locked]
    run_to_end("uv pip install", argv, log_path=log, timeout_s=BUILD_TIMEOUT_S)
    for name, before, after in PATCHES:
        file = folder / name
        file.write_text(file.read_text().replace(before, after))
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    for name, program in (
        ("python", PYTHON),
        ("torchrun", "../usr/bin/torchrun"),
        ("accelerate", "../site/bin/accelerate"),
        ("deepspeed", "../site/bin/deepspeed"),
    ):
        (programs / name).symlink_to(program)
