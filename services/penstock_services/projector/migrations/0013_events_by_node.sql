-- The events of a node itself, for `penstock events --node`: a few of all events.
CREATE INDEX events_by_node ON events (node_id, seq, n) WHERE job_id IS NULL AND node_id IS NOT NULL;
