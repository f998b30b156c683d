"""Reports of simulated tasks and nodes: losses, steps, stage profiles, telemetry."""
