"""Parts on their own."""
