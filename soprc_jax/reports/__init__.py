"""Reports for people: one HTML page on a training run or on a comparison, which needs nothing but itself."""
