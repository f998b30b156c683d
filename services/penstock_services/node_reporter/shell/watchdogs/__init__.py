"""Watchdogs: tasks end when their node has lost the log (lease), and a reporter that hangs is killed."""
