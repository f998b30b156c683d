"""HTTP routes of commands on jobs, nodes and the ledger: hold, move, drain, exec, verify, repair."""
