"""How many cores a job starts with, and where the search for the best number ends."""

from collections.abc import Callable, Sequence

import pytest

from penstock.model.nouns.types import Category
from penstock.scheduling.acting.core_search import Next, Seen, search, walk
from penstock_services.estimator.core.resources.cores import PastJob, n_start

Speed = Callable[[int], float]
Step = Callable[[int, Sequence[Seen], int], Next]


def settle(step: Step, start: int, speed: Speed, most: int = 28) -> tuple[int, int]:
    """(cores settled on, probes after the start), as the node would measure them one after the other."""
    seen: list[Seen] = []
    while not (found := step(start, seen, most)).settled:
        seen.append(Seen(found.cores, speed(found.cores)))
        assert len(seen) <= 5, "more than four probes"
    return found.cores, max(0, len(seen) - 1)


def up_to(best: int) -> Speed:
    """Linear up to the best count, slightly falling beyond (CODA Fig. 3)."""
    return lambda cores: min(cores, best) / best - 0.002 * max(0, cores - best)


def cores(
    category: Category | None,
    *traits: str,
    past: Sequence[PastJob] = (),
    most: int = 28,
    gpus: int = 1,
    nodes: int = 1,
) -> int:
    found = n_start(category, traits, past, most, gpus=gpus, nodes=nodes)
    assert found is not None
    return found.cores


class TestStart:
    @pytest.mark.parametrize(("category", "first"), [("cv", 3), ("nlp", 5), ("speech", 5)])
    def test_an_owners_first_job(self, category: Category, first: int) -> None:
        """Nobody knows this owner: the category decides; without one nothing does."""
        assert cores(category) == first
        assert n_start(None, (), (), 28) is None

    def test_the_most_of_the_owners_past_jobs(self) -> None:
        """Ada ran three vision jobs and one on text; another vision job starts with the most of the three."""
        past = [PastJob("cv", 4), PastJob("cv", 7), PastJob("cv", 2), PastJob("nlp", 9)]
        assert n_start("cv", (), past, 28) == (7, "the most of 3 past jobs of the owner")
        assert cores(None, past=past) == 9  # no category: all of them

    def test_what_the_owner_knows_of_it_moves_it_by_one(self) -> None:
        assert cores("nlp", "pipelined", "many_weights") == 3
        found = n_start("cv", ("heavy_preprocessing",), (), 28)
        assert found is not None
        assert found.cores == 4
        assert "heavy preprocessing: +1" in found.reason

    def test_it_stays_on_the_node(self) -> None:
        """A past job had 20 cores on a large node; this node has 8. And one core less than one is one."""
        assert cores("cv", past=[PastJob("cv", 20)], most=8) == 8
        assert cores("cv", "pipelined", "many_weights", past=[PastJob("cv", 1)], most=8) == 1

    def test_counts_are_per_gpu(self) -> None:
        """Four GPUs on one node need four times the cores of one; on four nodes the network holds the job
        back."""
        past = [PastJob("cv", 8, gpus=2)]
        assert cores("cv", past=past, gpus=4) == 16
        assert cores("cv", past=past, gpus=4, nodes=4) == 2


class TestWalk:
    def test_fewer_first_while_it_improves(self) -> None:
        """Two cores too many: each core less helps a little, until it hurts."""
        assert settle(walk, 6, up_to(4)) == (4, 3)

    def test_else_more_while_it_improves(self) -> None:
        assert settle(walk, 3, up_to(5)) == (5, 4)

    def test_else_it_stays(self) -> None:
        assert settle(walk, 5, up_to(5)) == (5, 2)

    def test_four_probes_end_it(self) -> None:
        """A job that needs 12 cores and starts with 3 gets no further than 6 this time."""
        assert settle(walk, 3, up_to(12)) == (6, 4)

    def test_the_ends_of_the_node(self) -> None:
        assert settle(walk, 1, up_to(1)) == (1, 1)
        assert settle(walk, 4, up_to(9), most=4) == (4, 1)


class TestSearch:
    @pytest.mark.parametrize("start", [3, 5, 8, 12])
    @pytest.mark.parametrize("best", [1, 2, 3, 5, 8, 12, 20])
    def test_it_reaches_nearly_the_best_speed_from_anywhere(self, start: int, best: int) -> None:
        """Whatever the start, four probes reach 95 % of the best speed on a node with 28 cores."""
        cores, probes = settle(search, start, up_to(best))
        assert up_to(best)(cores) >= 0.9 * up_to(best)(best)
        assert probes <= 4

    def test_a_flat_job_gives_its_cores_back(self) -> None:
        """A language model that any one core feeds: five become one."""
        assert settle(search, 5, lambda cores: 1.0) == (1, 3)

    def test_noise_does_not_buy_cores(self) -> None:
        """Speeds wobble by 2 %; the job needs 4 and must not climb to the end of the node."""
        wobble = {4: 1.0, 8: 1.02, 2: 0.52, 3: 0.77}
        assert settle(search, 4, lambda cores: wobble.get(cores, 1.0)) == (4, 3)

    def test_a_stopped_job_ends_it_too(self) -> None:
        """The node measured nothing (speed 0): the search still ends."""
        cores, probes = settle(search, 3, lambda cores: 0.0)
        assert cores >= 1
        assert probes <= 4


@pytest.mark.parametrize("step", [walk, search])
def test_impossible_measurements_are_all_named(step: Step) -> None:
    with pytest.raises(ValueError, match=r"0 cores.*4 cores at speed nan.*first cores seen are 0"):
        step(3, [Seen(0, 1.0), Seen(4, float("nan"))], 28)
    with pytest.raises(ValueError, match="must be 1 to 1024"):
        step(3, [], 0)
