-- Stages as each owner measured them, what kind of training a run was, and the kills for memory, which a restart looks for.

ALTER TABLE runs ADD COLUMN category text;

CREATE INDEX runs_killed ON runs (seq DESC) WHERE set_aside LIKE 'out_of_memory%';

CREATE TABLE stages (
    model text NOT NULL,
    batch_size bigint NOT NULL,
    gpus integer NOT NULL,
    owner text NOT NULL, -- '': what the cell was told
    first_seq bigint NOT NULL,
    last_seq bigint NOT NULL,
    storage_ms double precision NOT NULL,
    cpu_ms double precision NOT NULL,
    gpu_ms double precision NOT NULL,
    network_ms double precision NOT NULL,
    idle_ms double precision NOT NULL,
    iteration_ms double precision NOT NULL,
    iterations bigint NOT NULL,
    PRIMARY KEY (model, batch_size, gpus, owner)
);
