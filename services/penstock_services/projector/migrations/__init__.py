"""The read models' tables, as numbered SQL files."""
