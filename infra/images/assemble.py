"""Root folder of the image without a distribution: an environment, its interpreter, and their libraries.

    python3 assemble.py /opt/penstock /image

Runs in a stage of the Dockerfile, with the standard library alone. Bytecode is compiled with unchecked hashes
of the sources: it depends on no time of a file, and a start looks at no source.
"""

import compileall
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from py_compile import PycInvalidationMode

ID = 65532
SECRETS = (
    *("batcher", "contention-guard", "estimator", "gateway", "migrator", "placer", "projector"),
    *("node-0", "node-1", "user"),
)
"""Owners of secrets in docker-compose.yml."""
WITHOUT_STANDARD = (
    *(
        "test",
        "idlelib",
        "tkinter",
        "turtledemo",
        "lib2to3",
        "ensurepip",
        "pydoc_data",
        "config-*",
        "distutils",
    ),
    *("_dbm.*", "_gdbm.*", "_curses*", "nis.*", "readline.*", "_tkinter.*"),
)
"""Parts of the standard library that no service imports, and modules whose libraries nothing else needs."""
WITHOUT = ("tests", "*.pyi", "*.pxd", "*.pyx", "*.h", "*.hpp", "*.c", "*.a", "*.f90", "__pycache__")
"""Parts of packages: tests, and what only compilers and type checkers read."""
UNUSED = (
    *(
        f"scipy/{part}"
        for part in ("cluster", "datasets", "differentiate", "fftpack", "integrate", "interpolate")
    ),
    *(f"scipy/{part}" for part in ("io", "misc", "ndimage", "odr", "signal", "stats")),
    "numpy/distutils",
    *("pygments/lexers/[a-z]*.py", "pygments/lexers/_*_builtins.py"),
    "*.dist-info/RECORD",
)
"""Parts that neither a service nor the package's other parts import, below `site-packages`."""
LOADED_BY_NAME = ("libgcc_s.so.1",)
"""Libraries that the C library loads when a thread is cancelled."""


def copy_python(root: Path) -> None:
    """The interpreter with its standard library, at the paths that it has here."""
    program = Path(sys.executable).resolve()
    place = _under(root, program)
    shutil.copy(program, place)
    (place.parent / "python3").symlink_to(program.name)
    standard = Path(sysconfig.get_path("stdlib"))
    without = shutil.ignore_patterns(*WITHOUT_STANDARD, "__pycache__", "site-packages", "dist-packages")
    shutil.copytree(standard, _under(root, standard), symlinks=False, ignore=without, dirs_exist_ok=True)


def copy_environment(environment: Path, root: Path) -> None:
    """The virtual environment with its packages."""
    without = shutil.ignore_patterns(*WITHOUT, "Activate.ps1", "activate*")
    copied = shutil.copytree(environment, _under(root, environment), symlinks=True, ignore=without)
    for packages in copied.glob("lib/python3*/site-packages"):
        for unused in (path for pattern in UNUSED for path in packages.glob(pattern)):
            shutil.rmtree(unused) if unused.is_dir() else unused.unlink()
        link_copies(packages)


def link_copies(packages: Path) -> None:
    """One file in place of equal libraries that two packages have."""
    known: dict[tuple[str, bytes], Path] = {}
    for library in sorted(packages.glob("*.libs/*")):
        first = known.setdefault((library.name, library.read_bytes()), library)
        if first != library:
            library.unlink()
            library.hardlink_to(first)


def strip(root: Path) -> None:
    """Takes the symbols from packages' modules, up to nine tenths of one.

    Libraries in `NAME.libs` would break: their program headers have been moved."""
    modules = [str(path) for path in _programs(root) if not path.parent.name.endswith(".libs")]
    subprocess.run(["strip", "--strip-unneeded", *modules], check=True)


def copy_libraries(root: Path) -> None:
    """Each shared library that a program or library under `root` needs from outside of it."""
    needed = set()
    for path in _programs(root):
        listed = subprocess.run(["ldd", path], capture_output=True, text=True, check=False).stdout
        needed |= set(re.findall(r"(/\S+) \(0x", listed))
    known = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    for name in LOADED_BY_NAME:
        needed |= set(re.findall(rf"^\s*{re.escape(name)} .* => (\S+)", known, re.MULTILINE))
    for library in sorted(needed):
        place = _under(root, Path(library))
        if not library.startswith(str(root)) and not place.exists():
            shutil.copy(library, place)
    folders = sorted({str(Path(library).parent) for library in needed if not library.startswith(str(root))})
    (root / "etc/ld.so.conf").write_text("".join(f"{folder}\n" for folder in folders))
    subprocess.run(["ldconfig", "-r", root], check=True)
    shutil.rmtree(root / "var", ignore_errors=True)


def write_system(root: Path) -> None:
    """Names for the user, the order of name services, authorities, and an empty /tmp."""
    etc = root / "etc"
    (etc / "passwd").write_text(f"penstock:x:{ID}:{ID}::/nonexistent:/nonexistent\n")
    (etc / "group").write_text(f"penstock:x:{ID}:\n")
    (etc / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files dns\n")
    authorities = Path("/etc/ssl/certs/ca-certificates.crt")
    if authorities.exists():
        shutil.copy(authorities, _under(root, authorities))
    (root / "tmp").mkdir()
    (root / "tmp").chmod(0o1777)


def make_folders(root: Path) -> None:
    """Mount points of data and of each service's secrets: an engine gives an empty volume their owner."""
    for place in ("var/lib/penstock", *(f"etc/penstock/{name}" for name in ("", *SECRETS))):
        (root / place).mkdir(parents=True, exist_ok=True)
        (root / place).chmod(0o700)
        os.chown(root / place, ID, ID)


def compile_all(root: Path) -> None:
    """Bytecode beside each source, with the path that the source has in the image."""
    for folder in (Path(sysconfig.get_path("stdlib")), Path("/opt")):
        compileall.compile_dir(
            root / folder.relative_to("/"),
            maxlevels=20,
            quiet=2,
            stripdir=str(root),
            prependdir="/",
            invalidation_mode=PycInvalidationMode.UNCHECKED_HASH,
        )


def _programs(root: Path) -> Iterator[Path]:
    """Files in ELF format, in a stable order."""
    for path in sorted(root.rglob("*")):
        if path.is_file() and not path.is_symlink():
            with path.open("rb") as file:
                if file.read(4) == b"\x7fELF":
                    yield path


def _under(root: Path, path: Path) -> Path:
    """The same path under `root`; its folder exists afterwards."""
    place = root / path.relative_to("/")
    place.parent.mkdir(parents=True, exist_ok=True)
    return place


def main() -> None:
    environment, root = map(Path, sys.argv[1:])
    os.umask(0o022)
    for name in ("etc", "proc", "sys", "dev", "run"):
        (root / name).mkdir(parents=True)
    copy_environment(environment, root)
    strip(root)
    copy_python(root)
    copy_libraries(root)
    write_system(root)
    make_folders(root)
    compile_all(root)


if __name__ == "__main__":
    main()
