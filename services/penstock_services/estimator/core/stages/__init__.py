"""Stage profiles: the time of an iteration by resource. Source: Muri §5."""
