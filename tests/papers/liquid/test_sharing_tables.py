"""Liquid's sharing by Gavel's measured pairs: what follows from the pairs is followed, and learning never
makes sequences longer."""

import pytest

from tests.papers.liquid import sharing_tables as paper

pytestmark = pytest.mark.skipif(
    not (paper.DATA / "gavel_colocated_throughput.csv").is_file(),
    reason=f"Gavel's tables are not in {paper.DATA}; set PENSTOCK_DATA to the folder that holds gavel/",
)


def test_a_pair_that_does_not_slow_each_other_halves_the_total_time() -> None:
    """ResNet-18 with small batches on a V100: measured as fast together as alone."""
    found = paper.change("CNN-MNIST*8", paper.Truth("v100", 0.0, 0.0), "fits", 3)
    assert found == pytest.approx([-50.0] * 3, abs=0.1)


def test_on_a_k80_two_of_a_kind_only_save_the_overlap_of_launch_and_save() -> None:
    alone = paper.change("CNN-MNIST*8", paper.Truth("k80", 0.0, 0.0), "fits", 3)
    assert all(abs(value) < 5 for value in alone), "each has half of its speed beside the other"
    phases = paper.change("CNN-MNIST*8", paper.Truth("k80"), "fits", 3)
    assert all(both < one - 5 for both, one in zip(phases, alone, strict=True))


@pytest.mark.parametrize("gpu", ["k80", "p100", "v100"])
def test_what_was_learned_never_makes_a_sequence_longer_than_without_sharing(gpu: str) -> None:
    """NeuMF's stand-in with small batches has a sixth of its speed beside itself on a V100: by Liquid's rule
    alone it takes three times as long."""
    for name in paper.SEQUENCES:
        assert max(paper.change(name, paper.Truth(gpu), "learned", 5)) <= 0.1
