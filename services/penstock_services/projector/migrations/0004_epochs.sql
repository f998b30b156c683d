-- The ledger's epoch as of the position: whether a loss of records that shows here was accepted since.
ALTER TABLE positions ADD COLUMN epoch integer NOT NULL DEFAULT 0;
