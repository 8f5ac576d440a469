"""Measures the stability that the paper's theory bounds, on a small model."""
