"""Which cores and bandwidth caps are proposed, and when: pure."""
