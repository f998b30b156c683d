"""Muri (SIGCOMM '22): multi-round grouping of jobs by maximum-weight matching."""
