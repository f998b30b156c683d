-- When a gateway last had the connection: at its beginning, or at a roll call since.
ALTER TABLE connections ADD COLUMN seen_at timestamptz NOT NULL DEFAULT now();
