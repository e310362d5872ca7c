"""Benchmarks of the real training step, on models of the real size with random weights."""
