-- Read models of one cell. Written by the projector alone, in one statement per batch together with its position.
CREATE TABLE positions (
    cell text PRIMARY KEY,
    next_offset bigint NOT NULL,
    seq bigint NOT NULL,
    head_id text NOT NULL,
    term bigint NOT NULL,
    now_ms bigint NOT NULL,
    frozen text NOT NULL
) WITH (fillfactor = 20);

CREATE TABLE jobs (
    job_id text PRIMARY KEY,
    seq bigint NOT NULL,
    name text NOT NULL,
    owner text NOT NULL,
    status text NOT NULL,
    model text,
    workers integer NOT NULL,
    parameter_servers integer NOT NULL,
    attempt integer NOT NULL,
    infrastructure_retries integer NOT NULL,
    submitted_seq bigint NOT NULL,
    token bigint,
    submitted_ms bigint NOT NULL,
    queued_ms bigint,
    placed_ms bigint,
    running_ms bigint,
    ended_ms bigint,
    outcome text,
    exit_code integer,
    reason text NOT NULL,
    stop_reason text,
    unschedulable text,
    nodes text[] NOT NULL,
    gpus integer NOT NULL,
    labels json NOT NULL,
    estimate json,
    spec json NOT NULL
) WITH (fillfactor = 70);
CREATE UNIQUE INDEX jobs_by_age ON jobs (submitted_seq);
CREATE INDEX jobs_by_owner ON jobs (owner, submitted_seq);

CREATE TABLE tasks (
    task_id text PRIMARY KEY,
    job_id text NOT NULL,
    attempt integer NOT NULL,
    token bigint NOT NULL,
    role text NOT NULL,
    rank integer NOT NULL,
    node_id text NOT NULL,
    gpus integer[] NOT NULL,
    cores integer[] NOT NULL,
    host_memory_mib bigint NOT NULL,
    gpu_memory_mib bigint NOT NULL,
    bandwidth_mbps bigint NOT NULL,
    status text NOT NULL,
    pid bigint,
    assigned_ms bigint,
    started_ms bigint,
    exited_ms bigint,
    exit_code integer,
    cause text,
    signal integer,
    detail text,
    usage json
) WITH (fillfactor = 70);
CREATE INDEX tasks_by_job ON tasks (job_id, attempt, rank);

CREATE TABLE nodes (
    node_id text PRIMARY KEY,
    seq bigint NOT NULL,
    status text NOT NULL,
    rack text NOT NULL,
    domain text NOT NULL,
    address text NOT NULL,
    boot_id text NOT NULL,
    gpu_model text,
    gpus integer NOT NULL,
    gpus_free integer NOT NULL,
    gpus_faulted integer NOT NULL,
    cores integer NOT NULL,
    cores_free integer NOT NULL,
    host_memory_mib bigint NOT NULL,
    host_memory_free_mib bigint NOT NULL,
    bandwidth_mbps bigint NOT NULL,
    bandwidth_free_mbps bigint NOT NULL,
    leaving boolean NOT NULL,
    tasks integer NOT NULL
) WITH (fillfactor = 50);

CREATE TABLE gpus (
    node_id text NOT NULL,
    gpu integer NOT NULL,
    uuid text NOT NULL,
    model text NOT NULL,
    memory_mib bigint NOT NULL,
    faulted boolean NOT NULL,
    task_id text,
    job_id text,
    PRIMARY KEY (node_id, gpu)
) WITH (fillfactor = 50);

CREATE TABLE decisions (
    seq bigint NOT NULL,
    n integer NOT NULL,
    at_ms bigint NOT NULL,
    term bigint NOT NULL,
    kind text NOT NULL,
    job_id text,
    node_id text,
    cause json NOT NULL,
    data json NOT NULL,
    explanation json,
    PRIMARY KEY (seq, n)
);
CREATE INDEX decisions_by_job ON decisions (job_id, seq);

CREATE TABLE events (
    seq bigint NOT NULL,
    n integer NOT NULL,
    at_ms bigint NOT NULL,
    type text NOT NULL,
    job_id text,
    node_id text,
    task_id text,
    data json NOT NULL,
    PRIMARY KEY (seq, n)
);
CREATE INDEX events_by_job ON events (job_id, seq, n);

CREATE TABLE snapshots (
    cell text NOT NULL,
    seq bigint NOT NULL,
    head_id text NOT NULL,
    term bigint NOT NULL,
    next_offset bigint NOT NULL,
    format text NOT NULL,
    sha256 text NOT NULL,
    body bytea NOT NULL,
    taken_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (cell, seq)
);
ALTER TABLE snapshots ALTER COLUMN body SET STORAGE EXTERNAL;
