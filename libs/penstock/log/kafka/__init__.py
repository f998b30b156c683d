"""Message log on Kafka: adapter, reader, topics and their rights (ACLs), workarounds for aiokafka."""
