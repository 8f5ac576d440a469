"""Helpers shared by several packages, one job per module. Private: they may change at any time."""
