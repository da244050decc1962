"""Ollama's native API, to and from OpenAI's chat completions, completions and embeddings."""
