"""Keep the history of recorded runs: tables and a figure over runs, and what is kept in git."""
