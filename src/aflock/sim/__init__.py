"""Virtual time: a federation on one clock, fair to every rule and repeatable to the last bit."""
