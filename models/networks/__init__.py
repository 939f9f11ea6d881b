"""Networks no installed library has, or has in the form the papers ran. Imported only when a workload is built."""
