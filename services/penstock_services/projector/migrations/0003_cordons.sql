-- Operators' orders to place nothing new on a node; null: none.
ALTER TABLE nodes ADD COLUMN cordon json;
