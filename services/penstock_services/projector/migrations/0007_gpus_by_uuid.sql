-- UUIDs of a task's GPUs, in the order of `gpus`. Those of tasks that run are known; of tasks that have ended only the
-- ledger knows them: `penstock projections rebuild` fills them in.
ALTER TABLE tasks ADD COLUMN gpu_uuids text[] NOT NULL DEFAULT '{}';
UPDATE tasks SET gpu_uuids = ARRAY(
    SELECT g.uuid FROM unnest(tasks.gpus) WITH ORDINALITY AS held (gpu, n)
    JOIN gpus AS g ON g.node_id = tasks.node_id AND g.gpu = held.gpu ORDER BY held.n
) WHERE exited_ms IS NULL AND cardinality(gpus) > 0;
