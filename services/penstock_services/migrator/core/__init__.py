"""When jobs are judged, and what is proposed: pure."""
