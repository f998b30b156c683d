"""Pure: models of what a job needs, trained on finished runs. Arrays in, arrays out; random numbers only from seeds."""
