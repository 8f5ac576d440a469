"""The paper's simulations: estimation, interpolation and tracking errors on simulated scores."""
