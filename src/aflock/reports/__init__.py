"""Records, tables and pictures of what happened."""
