"""Discrete-event simulator: the services' cores in virtual time, with traces, simulated nodes,
job models and figures."""
