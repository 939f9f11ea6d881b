"""Run workloads: group their processes, exchange commands with them, and write rows."""
