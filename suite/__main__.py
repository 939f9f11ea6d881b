"""Run the command `encore`, as `python -m suite`."""

from suite.cli.main import main

main()
