"""The stability that the paper's theory bounds, measured on a small model."""
