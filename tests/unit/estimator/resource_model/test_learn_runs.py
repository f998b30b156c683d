"""Which measured runs to believe, and what is known of GPUs."""

import math

import pytest

from penstock_services.estimator.core.resource_model.gpus import GPUS, facts_of
from penstock_services.estimator.core.resource_model.measurements import (
    MEMORY,
    THROUGHPUT,
    UTILISATION,
    Task,
    card_mib,
)
from tests.papers.estimator.files.run_files import why_rejected

TASK = Task("resnet50", "V100", 2.0, "FP16", 64.0)
GOOD = {MEMORY: 14_000.0, UTILISATION: 93.0, THROUGHPUT: 700.0}


@pytest.mark.parametrize(
    ("name", "model", "memory_gib"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100-80", 80),
        ("A100_80GB", "A100-80", 80),
        ("A100-PCIE-40GB", "A100", 40),
        ("Tesla V100-SXM2-16GB", "V100", 16),
        ("V100-16", "V100", 16),
        ("NVIDIA GeForce RTX 2080 Ti", "2080TI", 11),
        ("2080Ti", "2080TI", 11),
        ("Quadro RTX 6000", "RTX6000", 24),
        ("NVIDIA RTX A6000", "A6000", 48),
        ("NVIDIA RTX 6000 Ada Generation", "RTX6000ADA", 48),
        ("NVIDIA H100 80GB HBM3", "H100", 80),
        ("A40", "A40", 48),
        ("A4000", "A4000", 16),
        ("Tesla T4", "T4", 16),
    ],
)
def test_a_gpu_is_known_by_any_of_its_names(name: str, model: str, memory_gib: float) -> None:
    """Drivers, clouds and people spell one card differently; A40 and A4000 must not be taken for each
    other."""
    facts = facts_of(name)
    assert facts is not None
    assert (facts.name, facts.memory_gib) == (model, memory_gib)


@pytest.mark.parametrize("name", ["", "T400", "Quadro P4000", "Radeon VII", "A", "1"])
def test_an_unknown_gpu_is_not_taken_for_another(name: str) -> None:
    """A Quadro P4000 is no P4 and no P40: better no facts than those of a card three times as large."""
    assert facts_of(name) is None


def test_the_table_is_in_its_units() -> None:
    """A figure of the marketing page (with sparsity, in MB/s) would stand out by orders of magnitude."""
    for gpu in GPUS:
        assert 4 <= gpu.memory_gib <= 300
        assert 100 <= gpu.bandwidth_gbps <= 10_000
        assert 4 <= gpu.full_tflops <= gpu.half_tflops <= 3_000
        assert 2014 <= gpu.year <= 2026


def test_the_very_cards_memory_wins_over_the_table() -> None:
    """A laptop's 3080 has 16 GiB, the desktop's 10."""
    assert card_mib(Task("m", "3080")) == 10_240
    assert card_mib(Task("m", "3080", card_mib=16_384.0)) == 16_384


def test_a_plausible_run_is_believed() -> None:
    """All of the card's memory and 100 % are extreme, but they happen; what was not measured is no fault."""
    assert why_rejected(TASK, GOOD) is None
    assert why_rejected(TASK, {MEMORY: 32_768.0, UTILISATION: 100.0, THROUGHPUT: math.nan}) is None


@pytest.mark.parametrize(
    ("measured", "reason"),
    [
        (GOOD | {MEMORY: 32_769.0}, "more GPU memory than the card has"),
        (GOOD | {UTILISATION: 100.5}, "utilisation is above 100 %"),
        (GOOD | {THROUGHPUT: -1.0}, "throughput is negative"),
        (GOOD | {MEMORY: math.inf}, "gpu_memory_mib is out of all range"),
        (GOOD | {MEMORY: 0.0}, "it never used its GPU"),
        ({MEMORY: math.nan}, "nothing was measured"),
        ({}, "nothing was measured"),
    ],
)
def test_an_absurd_measurement_discredits_the_run(measured: dict[str, float], reason: str) -> None:
    """A node's reporter mixed up two processes: what else it says about that run is worth as little."""
    assert why_rejected(TASK, measured) == reason


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        (Task("", "V100"), "the workload has no name"),
        (Task("m", "V100", 0.0), "the number of GPUs is not a whole number ≥ 1"),
        (Task("m", "V100", 1.5), "the number of GPUs is not a whole number ≥ 1"),
        (Task("m", "V100", math.nan), "the number of GPUs is not a whole number ≥ 1"),
        (Task("m", "V100", batch_size=0.0), "the batch size is out of range"),
        (Task("m", "abacus"), "the GPU is unknown and its memory is not given"),
        (Task("m", "V100", card_mib=-1.0), "the GPU's memory is not a number above 0"),
        (Task("m", "V100", card_mib=math.inf), "the GPU's memory is not a number above 0"),
    ],
)
def test_a_run_of_no_possible_job_is_rejected(task: Task, reason: str) -> None:
    """A trace from elsewhere holds jobs that no cluster could have run."""
    assert why_rejected(task, GOOD) == reason
