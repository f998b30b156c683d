"""Submission of jobs: `penstock submit`, `import`, `profile`; job files, flags, `#SBATCH` scripts."""
