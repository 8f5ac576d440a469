"""Entry points, run from the repository root: ``python -m experiments.NAME``. Flags are defined here only."""
