-- Jobs that ended up to this moment of the ledger, with their tasks and decisions, have left the tables; 0: none.
ALTER TABLE positions ADD COLUMN forgotten_ms bigint NOT NULL DEFAULT 0;
CREATE INDEX decisions_by_age ON decisions (at_ms) WHERE job_id IS NULL;
CREATE INDEX jobs_by_end ON jobs (ended_ms) WHERE ended_ms IS NOT NULL;
