"""From two captures to a graph whose inputs are read in place."""
