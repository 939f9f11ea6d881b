"""Which graphs serve calls: ways to serve a call take turns at the program's own calls, until times decide."""
