"""Entry points, run from the repository root: ``soprc NAME``. Flags are defined here only."""
