-- What a node can measure of the contention between its tasks; null: not reported.
ALTER TABLE nodes ADD COLUMN measures json;
