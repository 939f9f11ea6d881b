"""The process that holds one cell: a workload in one mode, built, checked, compiled, and measured on request."""
