"""Makes reports on training runs, each one self-contained HTML page."""
