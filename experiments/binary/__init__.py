"""Imbalanced binary classification: SOPRC beside the usual losses."""
