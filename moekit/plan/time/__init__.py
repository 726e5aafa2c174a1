"""How long a step takes: multiplications, memory, exchange, the host that launches, and what hides what."""
