-- Of each node the latest standing connection that any gateway of this cell has had; a goodbye deletes it.
CREATE TABLE connections (
    node_id text PRIMARY KEY,
    connection_id text NOT NULL
) WITH (fillfactor = 80);
