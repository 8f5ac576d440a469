"""Speed benchmarks against other packages; each module has ``rows()`` and ``growth()``."""
