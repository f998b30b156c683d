-- A run is what queries select by and one body. Runs and stages are read again from the ledger.

DROP TABLE runs;

CREATE TABLE runs (
    seq bigint PRIMARY KEY,
    key bytea NOT NULL,
    owner text NOT NULL,
    rejected text NOT NULL, -- why nothing is learned from it; '': it is sound
    with_steps boolean NOT NULL,
    host_memory_mib bigint NOT NULL, -- estimated; 0: unknown
    body bytea NOT NULL -- MessagePack of FinishedRun
);

CREATE INDEX runs_by_key ON runs (key, seq DESC) WHERE rejected = '';
CREATE INDEX runs_killed ON runs (seq DESC) WHERE rejected LIKE 'out_of_memory%';

DELETE FROM stages;
UPDATE positions SET next_offset = 0;
