"""Let independent kernels of one captured graph run at the same time, with the same nodes and addresses.

`launch_log` notes what each launch reads and writes while a function is captured on one stream, `order` turns these
records into edges, `edges` puts them into a clone of the captured graph.
"""
