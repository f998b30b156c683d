"""Matching of GPU models by name: `v100`, `NVIDIA V100`, Slurm's `tesla_v100`, SkyPilot's `V100:1`,
nvidia-smi's own `Tesla V100-SXM2-16GB`.

Ideal: one name per model. Departure: NVML, device plugins and people write several, so that names are
compared by their parts, in lower case and without the vendor's words. One name must have all parts of the
other. `a10` is not `a100`, and `3090` not `3090 Ti`. Equal names match without any of this.
"""

import re
from collections.abc import Sequence
from functools import lru_cache

VENDORS = frozenset(
    [
        "nvidia",
        "tesla",
        "geforce",
        "quadro",
        "amd",
        "instinct",
        "radeon",
        "intel",
        "gpu",
        "graphics",
        "generation",
    ]
)
"""Words that say nothing about the model."""
VARIANTS = frozenset(("ti", "super", "ada", "laptop", "max", "q"))
"""Words that make another model of the one before."""
SLICE = "mig"
"""A part of a GPU: another thing than the whole one."""
COUNTED = re.compile(r"(.+):([0-9]{1,3})\Z")
"""A name with a number of GPUs, as SkyPilot and Slurm write both."""
COUNT_BEFORE = re.compile(r"([0-9]{1,2})[xX]-?([A-Za-z].*)")
"""The same as price lists write it, `8xA100`."""
MAX_CACHED = 4_096  # pairs of lists and models; a cell has a few models, users a few spellings
VOWELS = "AEFHILMNORSX8aefhilmnorsx"
"""Letters and digits whose own names begin with a vowel."""


def allows(allowed: tuple[str, ...], model: str) -> bool:
    """Whether a GPU of this model may be used; no allowed name: any may."""
    return not allowed or model in allowed or _allows(allowed, model)


@lru_cache(MAX_CACHED)
def _allows(allowed: tuple[str, ...], model: str) -> bool:
    known = _parts(model)
    return any(_alike(_parts(name), known) for name in allowed)


def _parts(name: str) -> tuple[str, ...]:
    """`NVIDIA GeForce RTX 3090 Ti` → rtx, 3090ti."""
    counted = COUNTED.match(name)
    found: list[str] = []
    for word in re.findall(r"[a-z0-9]+", (counted[1] if counted else name).lower()):
        if word in VARIANTS and found:
            found[-1] += word
        elif word not in VENDORS:
            found.append(word)
    return tuple(found)


def _alike(one: tuple[str, ...], other: tuple[str, ...]) -> bool:
    if not one or not other or (SLICE in one) != (SLICE in other):
        return False
    return _covers(one, other) or _covers(other, one)


def _covers(whole: tuple[str, ...], parts: tuple[str, ...]) -> bool:
    """Whether each part is one of the whole's, or several neighbours written as one word: `rtx3090`."""
    runs = {
        "".join(whole[begin:end]) for begin in range(len(whole)) for end in range(begin + 1, len(whole) + 1)
    }
    return runs.issuperset(parts)


def counted_wrongly(name: str, gpus: int | None) -> str:
    """What is wrong with `V100:2` in a job with this number of GPUs; empty: nothing."""
    counted = COUNTED.match(name)
    if (before := COUNT_BEFORE.match(name)) is not None:
        number, model = int(before[1]), before[2]
    elif counted is None or int(counted[2]) == (1 if gpus is None else gpus):
        return ""
    else:
        number, model = int(counted[2]), counted[1]
    return f"{name} has a number of GPUs; write {model}, and `resources: {{gpus: {number}}}` (--gpus)"


def listed(names: Sequence[str]) -> str:
    """`an A100 or a V100`."""
    return " or ".join(f"{'an' if name[0] in VOWELS else 'a'} {name}" for name in names)
