"""Codec, envelope and versions of events on the log: encoding, upcasters, speakers, additions."""
