"""Turn a recorded graph into one whose inputs are read in place."""
