-- Who holds a job, since when and why; null: it is not held.
ALTER TABLE jobs ADD COLUMN held json;
