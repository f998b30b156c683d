"""How fast jobs really run: measured tables, a file for each, and what they do to one another."""
