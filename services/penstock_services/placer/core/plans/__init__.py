"""Plans and proposals: units, groups, moves, adjustments, promises of groups."""
