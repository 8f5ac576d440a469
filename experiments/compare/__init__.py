"""A comparison of methods under one protocol: its plan, its runs, its tables and its page."""
