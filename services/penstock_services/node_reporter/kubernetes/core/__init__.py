"""Pure core: objects of an API server and orders in, events and writes out; no IO, no clock."""
