"""Groups of jobs that share GPUs in turns (interleaving): candidates, prediction, search, plan."""
