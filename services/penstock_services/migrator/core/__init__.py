"""When a job's convergence is evaluated, and which moves are proposed: pure."""
