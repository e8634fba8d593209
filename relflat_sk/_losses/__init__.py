"""The table of criteria: targets, divisors, best constants, curvature in closed form."""
