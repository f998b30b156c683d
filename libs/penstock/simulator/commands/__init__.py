"""The commands of the simulator: `simulate`, `compare`, `traces`, …; one file each, one table of verbs."""
