"""Configs of experiments: ``--config=configs/NAME.py[:ARGUMENT]``."""
