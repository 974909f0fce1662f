"""What client and server agree on: the wire format, headers, refusals, URLs."""
