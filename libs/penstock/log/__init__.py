"""The log: one port, and its adapters for memory, Postgres and Kafka."""
