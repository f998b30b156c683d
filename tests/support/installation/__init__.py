"""Whole installations: services, machines with addresses of their own, releases."""
