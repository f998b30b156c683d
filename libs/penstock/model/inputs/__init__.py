"""Events from outside of the placer: jobs, nodes, tasks, telemetry, estimates, dead letters."""
