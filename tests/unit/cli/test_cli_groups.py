"""How groups read: members in the order of their rotation, with the speeds that were predicted."""

from rich.console import Console

from penstock.cli.queries.groups import groups_table, turns_of

GROUP = {
    "group_id": "group-7-0",
    "job_ids": ["a", "b", "d"],
    "nodes": ["n1", "n2"],
    "gpus": 8,
    "since_ms": 1_000,
    "seq": 7,
    "by": "batcher",
    "reason": "shares nothing",
    "turns": {
        "job_ids": ["b", "c", "a"],
        "period_ms": 120.0,
        "efficiency": 0.85,
        "speeds": [0.9, 0.5, 0.76],
        "alternative": "alone, 1.4 x later",
    },
}


def drawn(*, wide: bool = False) -> list[list[str]]:
    console = Console(width=200, record=True, color_system=None, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(groups_table([GROUP], 61_000, wide=wide))
    return [line.split() for line in console.export_text().splitlines() if line.strip()]


def test_members_stand_in_the_order_of_their_rotation() -> None:
    """`c` has left since, and `d` has joined, of which nothing was predicted."""
    head, *lines = drawn()
    assert head[:3] == ["GROUP", "NODES", "GPUS"]
    assert lines == [
        ["group-7-0", "n1,", "n2", "8", "1m", "00s", "120", "ms", "85%", "b", "0.90"],
        ["a", "0.76"],
        ["d", "–"],
    ]
    assert drawn(wide=True)[1][-3:] == ["batcher", "shares", "nothing"]


def test_a_member_is_described_with_its_group_and_what_it_waits() -> None:
    job = {"job_id": "a", "now_ms": 61_000, "group": GROUP, "waits": None}
    assert turns_of(job) == (
        "with b and d since 1m 00s, asked for by batcher: shares nothing; predicted: 120 ms for one "
        "iteration of each, 85% of the resources used, 0.76 of its speed alone; instead of: alone, 1.4 x "
        "later"
    )
    waits = {"at_ms": 1, "step_ms": 188.0, "waited_ms": 24.1, "missed_turns": 0}
    assert turns_of({**job, "waits": waits}).endswith("; 24.1 of 188 ms an iteration are waiting")
    assert turns_of({**job, "group": None}) == ""
