"""The fault laboratory: a cell of real services in virtual time, faults from one seed, and a judge."""
