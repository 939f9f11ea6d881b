"""Captured graphs as records: reading, editing, comparing, and capturing once more."""
