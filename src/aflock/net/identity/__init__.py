"""Identity: members and their tokens, certificates, TLS contexts."""
