-- Idempotency keys of submissions. Written by the gateway alone; not a projection of the ledger.
CREATE TABLE idempotency (
    key text PRIMARY KEY,
    spec_sha256 text NOT NULL,
    job_id text NOT NULL,
    appended boolean NOT NULL DEFAULT false,
    created_at timestamptz NOT NULL DEFAULT now()
) WITH (fillfactor = 80);
CREATE INDEX idempotency_by_age ON idempotency (created_at);
