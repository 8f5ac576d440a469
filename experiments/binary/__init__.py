"""Imbalanced binary classification: SOPRC compared with the usual losses."""
