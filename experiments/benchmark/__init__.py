"""Speed beside other packages: one module a benchmark, each with ``rows()`` and ``growth()``."""
