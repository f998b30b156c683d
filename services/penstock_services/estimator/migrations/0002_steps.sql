-- Steps, phases and remaining time of finished runs, and models of more than one kind.

ALTER TABLE runs
    ADD COLUMN total_gpus double precision,
    ADD COLUMN iterations double precision,
    ADD COLUMN step_ms double precision,
    ADD COLUMN launch_ms double precision,
    ADD COLUMN train_ms double precision,
    ADD COLUMN save_ms double precision,
    ADD COLUMN steps json,
    ADD COLUMN steps_aside text NOT NULL DEFAULT '',
    ADD COLUMN eta_left_ms double precision,
    ADD COLUMN eta_low_ms double precision,
    ADD COLUMN eta_high_ms double precision,
    ADD COLUMN eta_actual_ms double precision;

ALTER TABLE models
    ADD COLUMN kind text NOT NULL DEFAULT 'resources';
