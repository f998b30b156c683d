"""Builds and starts the real Kafka and Jaeger that development and tests use."""
