"""OpenAI's Responses API, to and from OpenAI's chat completions."""
