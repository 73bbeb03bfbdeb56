"""OpenAI's responses API, translated onto the path of chat completions."""
