"""Read replica of a cell, its snapshots, and the digest that readers compare."""
