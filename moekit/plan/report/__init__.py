"""A plan as text for a terminal, as values for a script, and as a picture."""
