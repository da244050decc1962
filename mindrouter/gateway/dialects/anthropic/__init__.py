"""Anthropic's Messages API, to and from OpenAI's chat completions."""
