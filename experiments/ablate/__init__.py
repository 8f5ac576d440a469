"""Ablations: the paper's Table 2, batch sizes, and every hyperparameter of SOPRC by itself."""
