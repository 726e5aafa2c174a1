"""`python -m moekit`."""

from moekit.cli import main

main()
