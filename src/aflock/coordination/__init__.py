"""Who may pull, which version they got, what becomes of what they send: no input, no output, time is an argument."""
