"""Hold one cell in a process: a workload in one mode, built, checked, compiled, and measured on request."""
