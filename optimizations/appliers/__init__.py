"""How a graph learns the address of an input that moved: from the host, by a prelude kernel, by rewritten PTX."""
