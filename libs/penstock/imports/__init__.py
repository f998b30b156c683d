"""Converters of other schedulers' job files into job files of Penstock."""
