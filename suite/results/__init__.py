"""Hold records of a run, their files, and the statistics that say what they show."""
