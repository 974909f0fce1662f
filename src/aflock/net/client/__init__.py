"""The network client: pulls jobs, trains, pushes updates, and keeps its state on disk."""
