"""What is simulated: jobs and clusters, read from files of many kinds, strictly, and written again."""
