"""Captured graphs as records, and replay built on them."""
