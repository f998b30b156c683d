"""Limits per owner on influence over other owners' estimates and on evictions: one row per limit, with its
reason.

Where two owners disagree, it is unknown which is right, so most limits no longer bind once a third has
measured the same.
"""

# Memory quotas: a sweep that names every run anew evicts at most a quarter of other owners' entries.
HISTORY_KEYS, HISTORY_KEYS_OF_ONE = 10_000, 2_500
NEAREST_NETWORKS, NEAREST_NETWORKS_OF_ONE = 1_000, 250  # likewise
STAGE_KEYS, STAGE_KEYS_OF_ONE = 2_000, 500  # likewise; the ledger's state has as many (decision 16)
KILLS, KILLS_OF_ONE = 32_000, 32  # they raise the owner's own promises only
CORE_OWNERS, CORE_RUNS_OF_ONE = 1_000, 64  # they set the owner's own cores only; older runs used older data

# Nearest runs: each owner counts with few runs, and the median decides.
NEAREST_OWNERS = 32  # of one network, the latest
NEAREST_STORED_OF_ONE = 4  # runs of a network that are stored
NEAREST_RUNS_OF_ONE = 2  # of the eight in an answer
ABOVE_OTHERS = 2.0  # memory, cores and time count up to so many times the next owner's

# Model of resources: a cell is the median over owners; no other owner contradicts a cell of one owner.
CELLS_OF_ONE = 100  # cells of one owner that always count; beyond, as many as all others measured together
# measurements that one cell counts for: the common error of repeats (machine, data) averages out no further
REPEATS = 8

# Stages: from three owners on the median over owners; of two the first.
STAGE_OWNERS = 16  # of one key; further ones add nothing

# Step times: a cell is the median over owners, and these bound the cells of a single owner.
SHARING_OWNERS = 2  # from which on a shared cell needs no bound by the usual value
OWNERS_DISAGREE = 4.0  # times: beyond, two owners measure different things, and the cell counts for neither
# times the usual value among owners: in none of Pollux' networks is a cell further than 4.6 from the median
BEYOND_USUAL = 8.0
TABLES_OF_ONE = 3  # a third of the tables, and of their cells, may be of one owner alone
STEP_RUNS, STEP_RUNS_OF_ONE = 10_000, 5_000  # read by a training
TEACHING_TABLES, TEACHING_OF_ONE = 8, 3  # tables that the prior is learned from: most of a training's time
CURVES, JOBS, WINDOWED = (
    300,
    1_000,
    300,
)  # loss curves, jobs and runs that all networks' spreads are learned from
TAUGHT_BY_ONE = 32  # of each of these three

# Parameters shared by all networks: no table, with any values, moves a parameter or a scale further than
# this.
MAX_SPREADS = 3.0  # of the spreads set by hand, over the number of tables
MAX_SCALE = 8.0  # times the scale set by hand

# Remaining times: bounds on the effect of others' runs on an interval.
MAX_STEP_ERROR = 1.5  # of ln: a run that slows down to a fifth of its speed
MAX_RUN_SPREAD = 1.0  # of ln, between runs of one job
MAX_RUN_ERROR = 5.0  # spreads
MAX_CURVE_ERROR = 2.5  # of ln(iterations left / done), either side: 12 times
