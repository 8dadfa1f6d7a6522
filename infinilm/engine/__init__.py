"""Many requests at once: what each asks, and what it is answered."""
