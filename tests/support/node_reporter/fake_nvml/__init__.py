"""Builds the pretended NVML library (fake_nvml.c) with the system's C compiler."""

import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("fake_nvml.c")
LIBRARY = "libnvidia-ml.so.1"


def build_fake_nvml(folder: Path) -> Path:
    """Compiles it into `folder`, which then goes first into LD_LIBRARY_PATH; returns the folder."""
    command = ["cc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", str(folder / LIBRARY), str(SOURCE)]
    subprocess.run(command, check=True)
    return folder
