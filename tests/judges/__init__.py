"""Tests that other projects wrote, run with Encore as the backend; `docs/judges.md` says how to start them."""
