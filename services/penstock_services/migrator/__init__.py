"""The migrator: proposes that running jobs go on elsewhere, by how their losses fall."""
