"""What shows the product: the demo, and every rule on a problem with a known optimum."""
