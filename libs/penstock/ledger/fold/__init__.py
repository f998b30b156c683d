"""The fold (`evolve`): the only writer of a cell's state, one function per kind of fact."""
