"""Endpoints for agents that others wrote: they speak OpenAI's or Anthropic's API, and their calls are captured as tokens."""
