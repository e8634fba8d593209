"""Benchmarks: what flatness costs (`costs`) and what it is worth (`worth`)."""
