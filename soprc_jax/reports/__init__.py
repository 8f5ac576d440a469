"""Reports for people: one HTML page on a training run, which needs nothing but itself."""
