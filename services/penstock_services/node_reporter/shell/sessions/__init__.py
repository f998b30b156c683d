"""Sessions with running tasks: commands in them (`penstock exec`) and their terminals (`penstock attach`)."""
