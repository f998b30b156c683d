"""The fault laboratory: the real cores in a world that does everything wrong that it may, from one seed."""
