"""Hold captured graphs as records, find the addresses of inputs in them, and update these in their nodes."""
