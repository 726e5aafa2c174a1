"""Metrics in Trackio, fed from the files of a run by a process outside the job."""
