"""OpenAI- and Anthropic-compatible endpoints for external agents; calls are captured as tokens."""
