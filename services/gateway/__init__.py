"""OpenAI- and Anthropic-compatible endpoints for external agents, captured as tokens."""
