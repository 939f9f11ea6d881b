"""What several processes decide alike about functions that hold collectives, without waiting for one another.

`votes` is the logic, on records; `ballot` keeps the open questions of this process and asks in the background;
`store_exchange` carries votes through the store that the process group was made with.
"""
