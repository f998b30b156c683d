"""Where the data sets lie; what needs one that is not there is skipped, with this path in its reason."""

import os
from pathlib import Path

DATA_ROOT = Path(os.environ.get("PENSTOCK_DATA", Path(__file__).parents[2] / "../shared/data"))
