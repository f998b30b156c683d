"""Pure: models of a job's resources, trained on finished runs. Arrays in, arrays out; random numbers only
from seeds."""
