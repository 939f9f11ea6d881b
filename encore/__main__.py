"""`python -m encore` is `encore`."""

from encore.own_packages import command

command()
