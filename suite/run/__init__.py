"""Run workloads: which processes are alive together, what they are asked in turn, and what is written when."""
