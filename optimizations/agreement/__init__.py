"""Let ranks decide alike about functions with collectives, without waiting for each other.

`votes` is the logic, on records; `ballot` keeps the open questions of this process and asks in the background;
`store_exchange` carries votes through the store that the process group was made with.
"""
