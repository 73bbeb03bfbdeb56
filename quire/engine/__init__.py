"""Engines: from prompt to text around one EngineCore."""
