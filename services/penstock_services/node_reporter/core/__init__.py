"""Pure: no IO, clock or chance."""
