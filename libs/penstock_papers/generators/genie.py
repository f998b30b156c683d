"""`genie/<n>-per-hour`: a day of tasks with service classes (GENIE, ICCD '20, table II).

Arrivals are Poisson over 24 hours; 5, 35 and 60 % of the tasks are urgent, prior and normal; half of them
train, half only infer; the type is one of Pollux's six measured models (the source's four were not
published). The total batch is sampled evenly from the measured ones, the iterations so that the task takes 10
– 60 minutes alone on one GPU, uniform in the logarithm: both are assumptions, the source gives neither.

Each task asks for one GPU: a policy that chooses ⟨n, g⟩ itself may give it others (job model `step-times` has
them). Its labels have its class and expected completion time, for the evaluation: `qos`, and `ect_s`, seconds
after its arrival. Source: GENIE eq. 4: urgent 0, prior the latency alone on one GPU, normal twice that; the
latency includes the 30 s of a start (ν, eq. 2).
"""

from collections.abc import Mapping, Sequence
from math import exp, log

from penstock.simulator.generators.base import Family, Generator, poisson_arrivals, rng_of, source
from penstock.simulator.job_models.measurements.measured import read_model
from penstock.simulator.job_models.measurements.placement_table import RESTART_S, Model
from penstock.simulator.job_models.measurements.steps import StepTimes
from penstock.simulator.traces.jobs import TraceJob

HOURS = 24.0
MODELS = ("bert", "cifar10", "deepspeech2", "imagenet", "ncf", "yolov3")
CLASSES, OF_TASKS = ("urgent", "prior", "normal"), (0.05, 0.35, 0.60)
EXPECTED: Mapping[str, float] = {"urgent": 0.0, "prior": 1.0, "normal": 2.0}
"""Expected completion time in latencies alone on one GPU. Source: GENIE eq. 4."""
SHORTEST_S, LONGEST_S = 600.0, 3_600.0
RATES = (5, 10, 20)


def genie(per_hour: int) -> Generator:
    """`per_hour` > 0."""

    def make(seed: int) -> Sequence[TraceJob]:
        rng = rng_of(seed, f"genie/{per_hour}")
        folder = source("genie", "pollux/traces")
        models = {name: read_model(folder / name) for name in MODELS}
        job_model = StepTimes(models, gpus_per_node=4)
        jobs: list[TraceJob] = []
        for index, submit_s in enumerate(poisson_arrivals(rng, per_hour, HOURS)):
            name = MODELS[int(rng.integers(len(MODELS)))]
            batches = _batches(models[name])
            alone_s = exp(float(rng.uniform(log(SHORTEST_S), log(LONGEST_S))))
            one = TraceJob(
                job_id=f"genie-{index}-{name}",
                submit_s=submit_s,
                duration_s=0.0,
                gpus=1,
                model=name,
                batch_size=batches[int(rng.integers(len(batches)))],
                owner="genie",
                iterations=1,
                inference=bool(rng.random() < 0.5),
            )
            service = CLASSES[int(rng.choice(len(CLASSES), p=OF_TASKS))]
            iteration_s = job_model.work_s(one)
            iterations = max(1, round(alone_s / iteration_s))
            work_s = iterations * iteration_s
            expected_s = EXPECTED[service] * (work_s + RESTART_S)
            labels = (("qos", service), ("ect_s", f"{expected_s:.3f}"))
            jobs.append(one._replace(iterations=iterations, duration_s=work_s, labels=labels))
        return jobs

    return Generator(
        f"GENIE's day with {per_hour} tasks an hour, training and inference, in three service classes",
        "4x4@T4",
        "step-times",
        make,
    )


def _batches(model: Model) -> Sequence[int]:
    """Total batches with measured gradient noise that fit on one GPU; ascending."""
    return sorted(int(batch) for batch, *_ in model.epochs[0].noise)


GENIE = Family({f"genie/{per_hour}-per-hour": genie(per_hour) for per_hour in RATES})
