"""What a job does before it trains: each node looked at, then the exchange that experts use measured.

It runs on the nodes, outside the containers: `PYTHONPATH=job python3 -m preflight ...`. Standard library alone, and
Python >= 3.9: the node's own.
"""
