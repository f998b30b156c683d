"""Measurements from the files of the data sets."""
