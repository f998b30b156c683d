-- Cores that a job's tasks may use, all together; 0: it holds none. Filled in from the tasks of its latest attempt; where fewer cores are
-- being tried, and of jobs that have ended, `penstock projections rebuild` corrects it.
ALTER TABLE jobs ADD COLUMN cores integer NOT NULL DEFAULT 0;
UPDATE jobs SET cores = (
    SELECT coalesce(sum(cardinality(t.cores)), 0) FROM tasks AS t WHERE t.job_id = jobs.job_id AND t.attempt = jobs.attempt
) WHERE placed_ms IS NOT NULL;
