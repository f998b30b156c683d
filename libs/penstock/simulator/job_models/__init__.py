"""Job models: how fast jobs run, from measured tables, and how they interfere with one another."""
