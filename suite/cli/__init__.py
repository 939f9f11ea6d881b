"""Define the command line: `main` lists the commands, of which long ones have modules of their own."""
