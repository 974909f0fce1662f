"""The product as a user meets it."""
