"""Models, one file an architecture whose data flow differs."""
