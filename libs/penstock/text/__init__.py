"""Text for people: plurals, local time, redaction of passwords, spelling suggestions, odd encodings."""
