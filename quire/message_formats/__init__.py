"""How models write messages: thinking, text and tool calls. One machine reads all formats, each a row of a table.

Knows tokenizers and no servers: `server.api` turns the parts of a message into the deltas of its APIs.
"""
