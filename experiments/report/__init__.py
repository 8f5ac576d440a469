"""Makes the HTML page on a run or on a comparison."""
