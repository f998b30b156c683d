"""When to plan, what is asked, and the proposal that comes of it. Pure."""
