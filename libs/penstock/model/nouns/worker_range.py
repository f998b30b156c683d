"""Rules of a moldable job: its range of workers, and their shares of the batch."""


def wrong_shape(
    fewest: int | None, most: int, servers: int, batch_size: int | None, global_batch_size: int | None
) -> tuple[str, str] | None:
    """The problem of a job's range of workers, or of their shares of the batch: (field of `JobSpec`, text
    with the remedy)."""
    if fewest is not None and fewest > most:
        return "min_workers", f"{fewest} is more than the most workers, {most}; give a smaller one"
    if fewest is not None and servers:
        return (
            "parameter_servers",
            "a job with a range of workers has none, since how many servers it needs depends on the workers; "
            "remove them or give one number of workers",
        )
    if global_batch_size is None:
        return (
            None
            if fewest is None
            else (
                "global_batch_size",
                "is missing; a job with a range of workers needs it in place of batch_size: the samples of "
                "all workers together",
            )
        )
    if batch_size is not None:
        return "batch_size", "contradicts global_batch_size, which the workers share; remove one of them"
    if global_batch_size < most:
        return (
            "global_batch_size",
            f"{global_batch_size} leaves some of {most} workers without a sample; give at least {most}",
        )
    return None


def numbers_between(fewest: int, most: int, count: int) -> list[int]:
    """All whole numbers from `fewest` to `most`, or at most `count` of them in a geometric sequence with both
    ends."""
    last = count - 1
    if most - fewest <= last:
        return list(range(fewest, most + 1))
    return sorted({round(fewest * (most / fewest) ** (number / last)) for number in range(count)})
