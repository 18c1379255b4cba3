"""The speed of the project itself, against its peers and its limits."""
