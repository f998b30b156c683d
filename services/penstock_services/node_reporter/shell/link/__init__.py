"""Link of the node to the cell: transactional outbox, telemetry samples, standing connection, log server."""
