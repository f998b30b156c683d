-- What finished runs used, as far as the ledger was read, and the models that were learned from them.

CREATE TABLE positions (
    cell text PRIMARY KEY,
    next_offset bigint NOT NULL
);

CREATE TABLE runs (
    seq bigint PRIMARY KEY,
    job_id text NOT NULL,
    ended_ms bigint NOT NULL,
    key bytea NOT NULL,
    owner text NOT NULL,
    model text,
    batch_size bigint,
    workers integer NOT NULL,
    parameter_servers integer NOT NULL,
    asked text[] NOT NULL,
    gpus integer NOT NULL,
    gpu_share_milli integer NOT NULL,
    cores integer NOT NULL,
    gpu_model text NOT NULL,
    card_memory_mib bigint NOT NULL,
    said_tier text,
    said_model_version text,
    said_confidence double precision,
    said_run_ms bigint,
    said_cores integer,
    said_host_memory_mib bigint,
    said_gpu_memory_mib bigint,
    said_gpu_utilisation_percent double precision,
    run_ms double precision,
    busy_cores double precision,
    host_memory_mib double precision,
    gpu_memory_mib double precision,
    gpu_utilisation_percent double precision,
    gpu_utilisation_std double precision,
    set_aside text NOT NULL
);

CREATE INDEX runs_by_key ON runs (key, seq DESC) WHERE set_aside = '';

CREATE TABLE models (
    version text PRIMARY KEY,
    trained_seq bigint NOT NULL,
    sha256 text NOT NULL,
    body bytea NOT NULL,
    runs integer NOT NULL,
    first_run_ms bigint NOT NULL,
    last_run_ms bigint NOT NULL,
    metrics json NOT NULL,
    promoted boolean NOT NULL
);
