"""Structured output: what a request may ask for, its grammar, and which tokens the grammar allows next.

`params` is what users hand in, `source` makes a grammar's text of it, `json_schema` refuses what would not be kept.
`checker` does that in a process of its own, for a front; `backend` is what the worker sees of a grammar library.
Knows no torch, no tokenizer files and no requests.
"""
