"""The same cores in virtual time: traces, simulated nodes, truth models, and what came of it."""
