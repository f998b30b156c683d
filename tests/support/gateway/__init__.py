"""A gateway and a projector on real servers, and what must never be shown by them."""
