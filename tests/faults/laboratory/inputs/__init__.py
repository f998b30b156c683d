"""What a run is given: jobs, a profile, and what users and operators send."""
