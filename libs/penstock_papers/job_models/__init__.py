"""Job models that belong to one paper: its simulator as published, quirks included."""
