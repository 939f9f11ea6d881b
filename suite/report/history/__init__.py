"""Keep the history of recorded runs: one row for each workload and mode, tables over runs, and what is kept in git."""

from suite.report.history.rows import HistoryRow, read_history, rows_of, write_history

__all__ = ["HistoryRow", "read_history", "rows_of", "write_history"]
