"""The HTTP server: OpenAI's and Anthropic's text APIs in front of an `AsyncLLMEngine`. Imports no torch."""
