"""Table of GPU models with their published performance figures, so that a model can predict an unseen one.

Facts only. Rates are dense (no sparsity). `half_tflops` is with 32-bit accumulation, as training uses it, so
the GeForce cards have half of the figure that is usually published. `full_tflops` is what "FP32" training
gets: since Ampere that is TF32 on the tensor cores. Where a card has no tensor cores, both are those of its
plain cores.
"""

import re
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple


class GpuFacts(NamedTuple):
    """One GPU model."""

    name: str
    memory_gib: float
    bandwidth_gbps: float
    """Of its memory, GB/s."""
    full_tflops: float
    half_tflops: float
    year: int
    """Year of its market launch."""
    generation: str
    """Its maker's name for the architecture."""


GPUS = (
    GpuFacts("K80", 12, 240, 4.4, 4.4, 2014, "Kepler"),  # one of its two halves
    GpuFacts("M60", 8, 160, 4.8, 4.8, 2015, "Maxwell"),
    GpuFacts("P4", 8, 192, 5.5, 5.5, 2016, "Pascal"),
    GpuFacts("P40", 24, 346, 11.8, 11.8, 2016, "Pascal"),
    GpuFacts("P100", 16, 732, 9.5, 19.0, 2016, "Pascal"),
    GpuFacts("1060", 6, 192, 4.4, 4.4, 2016, "Pascal"),
    GpuFacts("1070", 8, 256, 6.5, 6.5, 2016, "Pascal"),
    GpuFacts("1080", 8, 320, 8.9, 8.9, 2016, "Pascal"),
    GpuFacts("1080TI", 11, 484, 11.3, 11.3, 2017, "Pascal"),
    GpuFacts("TITANXP", 12, 548, 12.1, 12.1, 2017, "Pascal"),
    GpuFacts("TITANV", 12, 653, 14.9, 110.0, 2017, "Volta"),
    GpuFacts("V100", 32, 900, 15.7, 125.0, 2017, "Volta"),
    GpuFacts("T4", 16, 320, 8.1, 65.0, 2018, "Turing"),
    GpuFacts("2060", 6, 336, 6.5, 25.8, 2018, "Turing"),
    GpuFacts("2070", 8, 448, 7.5, 29.9, 2018, "Turing"),
    GpuFacts("2080", 8, 448, 10.1, 40.3, 2018, "Turing"),
    GpuFacts("2080TI", 11, 616, 13.4, 53.8, 2018, "Turing"),
    GpuFacts("TITANRTX", 24, 672, 16.3, 130.5, 2018, "Turing"),
    GpuFacts("RTX4000", 8, 416, 7.1, 57.0, 2018, "Turing"),
    GpuFacts("RTX5000", 16, 448, 11.2, 89.2, 2018, "Turing"),
    GpuFacts("RTX6000", 24, 672, 16.3, 130.5, 2018, "Turing"),
    GpuFacts("RTX8000", 48, 672, 16.3, 130.5, 2018, "Turing"),
    GpuFacts("A100", 40, 1555, 156.0, 312.0, 2020, "Ampere"),
    GpuFacts("A100-80", 80, 1935, 156.0, 312.0, 2020, "Ampere"),
    GpuFacts("A30", 24, 933, 82.0, 165.0, 2020, "Ampere"),
    GpuFacts("A40", 48, 696, 74.8, 149.7, 2020, "Ampere"),
    GpuFacts("A10", 24, 600, 62.5, 125.0, 2020, "Ampere"),
    GpuFacts("A10G", 24, 600, 35.0, 70.0, 2020, "Ampere"),
    GpuFacts("A16", 16, 200, 9.0, 17.9, 2020, "Ampere"),  # one of its four
    GpuFacts("3060", 12, 360, 12.7, 25.5, 2020, "Ampere"),
    GpuFacts("3070", 8, 448, 20.3, 40.6, 2020, "Ampere"),
    GpuFacts("3080", 10, 760, 29.8, 59.5, 2020, "Ampere"),
    GpuFacts("3080TI", 12, 912, 34.1, 68.2, 2020, "Ampere"),
    GpuFacts("3090", 24, 936, 35.6, 71.2, 2020, "Ampere"),
    GpuFacts("A2000", 6, 288, 16.0, 31.9, 2021, "Ampere"),
    GpuFacts("A4000", 16, 448, 38.3, 76.7, 2021, "Ampere"),
    GpuFacts("A4500", 20, 640, 47.3, 94.6, 2021, "Ampere"),
    GpuFacts("A5000", 24, 768, 55.6, 111.1, 2021, "Ampere"),
    GpuFacts("A5500", 24, 768, 68.2, 136.4, 2022, "Ampere"),
    GpuFacts("A6000", 48, 768, 77.4, 154.8, 2020, "Ampere"),
    GpuFacts("4070", 12, 504, 29.1, 58.3, 2022, "Ada"),
    GpuFacts("4080", 16, 717, 48.7, 97.5, 2022, "Ada"),
    GpuFacts("4090", 24, 1008, 82.6, 165.2, 2022, "Ada"),
    GpuFacts("RTX6000ADA", 48, 960, 182.1, 364.2, 2022, "Ada"),
    GpuFacts("L4", 24, 300, 60.5, 121.0, 2023, "Ada"),
    GpuFacts("L40", 48, 864, 90.5, 181.0, 2022, "Ada"),
    GpuFacts("L40S", 48, 864, 183.0, 362.0, 2023, "Ada"),
    GpuFacts("H100", 80, 3352, 494.0, 989.0, 2022, "Hopper"),
    GpuFacts("H100PCIE", 80, 2039, 378.0, 756.0, 2022, "Hopper"),
    GpuFacts("H200", 141, 4800, 494.0, 989.0, 2023, "Hopper"),
    GpuFacts("GH200", 96, 4000, 494.0, 989.0, 2023, "Hopper"),
    GpuFacts("B200", 180, 8000, 1125.0, 2250.0, 2024, "Blackwell"),
    GpuFacts("5090", 32, 1792, 104.8, 209.5, 2025, "Blackwell"),
)
BY_NAME = MappingProxyType({gpu.name: gpu for gpu in GPUS})
NAMES = tuple(sorted(BY_NAME, key=lambda name: (-len(name), name)))  # the longest matching name counts

MAKERS_WORDS = re.compile(r"NVIDIA|TESLA|QUADRO|GEFORCE|SXM\d?|[^A-Z0-9]")
GROUP = re.compile(r"^(?:RTX(?=A\d|[2-5]0\d\d)|GTX(?=1))")
REST = re.compile(
    r"(?:\d{1,3}GI?B?.*|16|24|32|40|48|64|80|\D.*)?"
)  # what may follow a name: a size or words, no digits


@lru_cache(maxsize=1_024)  # names come from nodes and job files: few, and each is looked up often
def facts_of(name: str) -> GpuFacts | None:
    """The facts of a GPU by any of
    its names ("NVIDIA A100-SXM4-80GB", "RTX 2080 Ti", "V100-16"); None: unknown."""
    plain = MAKERS_WORDS.sub("", name.upper())
    for text in dict.fromkeys((GROUP.sub("", plain), plain)):
        for known in NAMES:
            if "-" not in known and text.startswith(known) and REST.fullmatch(text[len(known) :]):
                return _variant(BY_NAME[known], text[len(known) :])
    return None


def generation_of(name: str) -> str:
    """Of a GPU by any of its names; one that is unknown is a generation of its own."""
    facts = facts_of(name)
    return name if facts is None else facts.generation


def _variant(found: GpuFacts, rest: str) -> GpuFacts:
    if found.name == "A100" and "80" in rest:
        found = BY_NAME["A100-80"]
    size = re.search(r"(\d{1,3})(?:GI?B?|$)", rest)
    return found._replace(memory_gib=float(size.group(1))) if size else found
