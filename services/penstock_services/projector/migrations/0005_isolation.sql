-- What a node enforces on its tasks; null: not reported. Whether several tasks may have a part of one of its GPUs.
ALTER TABLE nodes ADD COLUMN isolation json, ADD COLUMN shares_gpus boolean NOT NULL DEFAULT true;
