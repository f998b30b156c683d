"""How much one owner may move what other owners are answered, and push out of what is known: one row per limit, with its reason.

It is unknown which of two disagreeing owners is right, so most limits give way once a third has measured the same.
"""

# Room in memory: a sweep that names every run anew pushes out at most a quarter of what others ran.
HISTORY_KEYS, HISTORY_KEYS_OF_ONE = 10_000, 2_500
NEAREST_NETWORKS, NEAREST_NETWORKS_OF_ONE = 1_000, 250
STAGE_KEYS, STAGE_KEYS_OF_ONE = 2_000, 500
KILLS, KILLS_OF_ONE = 32_000, 32  # they raise his own promises only
CORE_OWNERS, CORE_RUNS_OF_ONE = 1_000, 64  # they set his own cores only; older ones are of yesterday's data

# Nearest runs: each owner counts with few, and the median decides.
NEAREST_OWNERS = 32  # of one network, the latest
NEAREST_STORED_OF_ONE = 4  # runs of a network that are stored
NEAREST_RUNS_OF_ONE = 2  # of the eight that answer
ABOVE_OTHERS = 2.0  # so many times may his memory, cores and time exceed the next owner's and be believed

# Model of resources: a cell is the median over owners; a cell of one owner alone is contradicted by none.
CELLS_OF_ONE = (
    100  # cells that he alone measured always count; beyond, as many as all others measured together
)
REPEATS = (
    8  # measurements that one cell counts for: what repeats share (machine, data) averages out no further
)

# Stages: the median over owners from three on, the first of two.
STAGE_OWNERS = 16  # of one key; further ones add nothing

# Step times: a cell is the median over owners, and these bound what he alone measured.
SHARING_OWNERS = 2  # for a shared cell to need no bound by what is usual
OWNERS_DISAGREE = 4.0  # times: beyond, two owners do not measure the same thing, and the cell is nobody's
BEYOND_USUAL = 8.0  # times what is usual among owners: in none of Pollux' networks is a cell further than 4.6 from the median
TABLES_OF_ONE = 3  # a third of the tables, and of their cells, may be of one owner alone
STEP_RUNS, STEP_RUNS_OF_ONE = 10_000, 5_000  # that a training reads
TEACHING_TABLES, TEACHING_OF_ONE = 8, 3  # tables that the prior is learned from: most of a training's time
CURVES, JOBS, WINDOWED = (
    300,
    1_000,
    300,
)  # loss curves, jobs and runs that all networks' spreads are learned from
TAUGHT_BY_ONE = 32  # of each of these three

# What all networks have in common: no table, whatever it holds, moves a parameter or a scale further than this.
MAX_SPREADS = 3.0  # of the spreads set by hand, over the number of tables
MAX_SCALE = 8.0  # times the scale set by hand

# Remaining times: what others' runs can do to an interval.
MAX_STEP_ERROR = 1.5  # of ln: a run that slows down to a fifth
MAX_RUN_SPREAD = 1.0  # of ln, between runs of one job
MAX_RUN_ERROR = 5.0  # spreads
MAX_CURVE_ERROR = 2.5  # of ln(iterations left / done), either side: 12 times
