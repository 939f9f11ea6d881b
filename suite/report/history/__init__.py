"""Maintain the history of recorded runs: tables and a figure over runs, and the files in git."""
