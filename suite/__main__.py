"""`python -m suite` is `encore`."""

from suite.cli.main import main

main()
