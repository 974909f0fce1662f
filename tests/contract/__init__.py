"""One suite over every registered rule: a new rule joins it by being registered."""
