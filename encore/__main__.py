"""Run the command `encore`, as `python -m encore`."""

from encore.own_packages import command

command()
