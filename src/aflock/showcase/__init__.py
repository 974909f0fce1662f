"""Demonstrations: `aflock demo`, and `aflock optimum`, every rule on a problem with a known optimum."""
