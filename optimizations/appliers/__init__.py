"""Update the addresses in a graph's nodes: from the host, by a prelude kernel, or by rewritten PTX."""
