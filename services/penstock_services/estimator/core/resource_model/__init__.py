"""Pure: models of what a job needs, trained on finished runs. Arrays in, arrays out; chance only by given seeds."""
