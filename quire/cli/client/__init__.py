"""The commands as clients of a server, over HTTP."""
