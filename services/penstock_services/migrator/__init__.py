"""The migrator: proposes to move running jobs to other nodes, by how their losses fall."""
