"""The federation as a state machine: journal records in, answers out; no clock, no socket, no file."""
