"""The command line in tests: its process, its terminal, and files that people bring."""
