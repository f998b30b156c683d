"""Interfaces (protocols) of a profile's stages."""
