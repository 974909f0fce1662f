"""Simulation in virtual time: all rules get the same clients and durations, and runs repeat to the last bit."""
