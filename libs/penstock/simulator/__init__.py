"""The same cores in virtual time: traces, simulated nodes, job models, and what came of it."""
