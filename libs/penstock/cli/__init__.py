"""The command line; it talks to the gateway and to nothing else."""
