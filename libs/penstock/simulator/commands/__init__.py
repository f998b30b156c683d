"""The commands of the simulator: `simulate`, `compare`, `traces`, …; registered by `penstock.cli.app`."""
