"""Containers: Podman, Docker Compose, and the images that the compose file names."""
