"""The command `encore`, which is also `python -m encore`; the code is in `suite`."""
