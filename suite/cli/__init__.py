"""Define the command line: one module for each command, and what they have in common."""
