"""Define networks that no installed library has in the form the papers ran. Imported only when a workload is built."""
