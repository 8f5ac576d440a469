"""Ablations: the paper's Table 2, batch sizes, and each hyperparameter of SOPRC separately."""
