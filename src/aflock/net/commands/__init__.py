"""The commands of the network: each parses its options, calls a function and prints the result."""
