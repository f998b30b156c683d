"""The gateway's own tables, as numbered SQL files."""
