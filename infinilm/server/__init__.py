"""OpenAI's and Anthropic's interfaces, in files and over HTTP."""
