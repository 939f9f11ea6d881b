"""`python -m suite` is `encore`."""

from suite.cli import main

main()
