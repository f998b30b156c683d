"""Base of events: registry, errors, topics, validation."""
