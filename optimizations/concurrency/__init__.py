"""Let independent kernels of one captured graph run at the same time, with the same nodes and addresses.

`launch_log` notes what each launch reads and writes while a function is captured on one stream, and `hidden_memory`
adds what no argument says. `order` turns these records into edges, `edges` exchanges them for the chain's in the
captured graph, and `branches` races the two.
"""
