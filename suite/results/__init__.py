"""Define the records of a run, read and write their files, and evaluate them by statistics."""
