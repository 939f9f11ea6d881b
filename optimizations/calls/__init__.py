"""Take the fast path from the generated code to the launch of a graph."""
