"""Message log with ordered, durable partitions: one port, and its adapters for Postgres and Kafka."""
