"""Members of a cell: joining and leaving nodes, leases, evidence of broken nodes, followers of jobs."""
