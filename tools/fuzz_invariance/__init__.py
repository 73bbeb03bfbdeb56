"""Random mixes of requests in random engines: each answer must be, bit for bit, that of its request alone.

`cases` is what a case consists of, `draw` makes one from a seed, `session` runs it, `check` compares, `shrink` looks
for a smaller one that fails too, and `faults` breaks the engine on purpose, to see that this is noticed.
"""
