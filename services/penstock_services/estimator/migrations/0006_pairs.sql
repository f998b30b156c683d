-- What jobs that share a GPU take from each other, and their steps alone.

CREATE TABLE pairs (
    owner text NOT NULL,
    model text NOT NULL,
    batch_size bigint NOT NULL, -- 0: not given
    gpu_model text NOT NULL,
    other_owner text NOT NULL,
    other_model text NOT NULL,
    other_batch_size bigint NOT NULL,
    own double precision NOT NULL, -- speed beside the other relative to alone
    other double precision NOT NULL,
    runs bigint NOT NULL,
    last_seq bigint NOT NULL,
    PRIMARY KEY (owner, model, batch_size, gpu_model, other_owner, other_model, other_batch_size)
);

CREATE TABLE steps_alone (
    owner text NOT NULL,
    model text NOT NULL,
    batch_size bigint NOT NULL,
    gpu_model text NOT NULL,
    step_ms double precision NOT NULL,
    last_seq bigint NOT NULL,
    PRIMARY KEY (owner, model, batch_size, gpu_model)
);
