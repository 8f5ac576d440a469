"""Provides data sets as random-access sources, and batches as pure functions of (seed, step)."""
