-- A snapshot and the tables name the offset of their head's record: whoever loads them proves that it lies there.
-- Snapshots only spare time, and are taken anew. What is behind the head was void, and is so again.
DELETE FROM snapshots;
ALTER TABLE snapshots DROP COLUMN next_offset;
ALTER TABLE snapshots ADD COLUMN head_offset bigint NOT NULL;
-- Nearly always the head is the last record that was read. Where a void one came after it, the projector stops and names
-- the remedy, `penstock projections rebuild`.
ALTER TABLE positions ADD COLUMN head_offset bigint NOT NULL DEFAULT -1;
UPDATE positions SET head_offset = next_offset - 1 WHERE seq > 0;
