-- A run is what queries select by and one body. Runs and stages are read again from the ledger.

DROP TABLE runs;

CREATE TABLE runs (
    seq bigint PRIMARY KEY,
    owner text NOT NULL,
    rejected text NOT NULL, -- why nothing is learned from it; '': it is sound
    with_steps boolean NOT NULL,
    body bytea NOT NULL -- MessagePack of FinishedRun
);

DELETE FROM stages;
UPDATE positions SET next_offset = 0;
