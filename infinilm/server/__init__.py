"""OpenAI's interface to an engine."""
