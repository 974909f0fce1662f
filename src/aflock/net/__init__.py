"""A federation over a real network: the same coordinator and rules behind an HTTP server that loses nothing."""
