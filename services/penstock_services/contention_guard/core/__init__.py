"""Which cores and caps are proposed, and when: pure."""
