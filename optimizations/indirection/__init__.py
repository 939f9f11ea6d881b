"""Copy-free replay: where a captured graph holds its inputs' addresses, and how they are replaced."""
