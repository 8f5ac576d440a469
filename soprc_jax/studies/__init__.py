"""The paper's claims, made into experiments."""
