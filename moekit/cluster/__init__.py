"""The cluster: its profile, and the command that writes one."""
