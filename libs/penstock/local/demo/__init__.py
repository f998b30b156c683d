"""`penstock demo`: real training jobs on a fresh installation, with a live table and a summary."""
