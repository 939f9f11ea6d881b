"""Read, edit and compare captured graphs as records, and capture a function once more."""
