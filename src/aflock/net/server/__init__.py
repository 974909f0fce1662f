"""The server: HTTP, authentication, updates, leases, metrics, settings."""
