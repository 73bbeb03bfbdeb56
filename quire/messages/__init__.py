"""Everything that crosses between front, core and worker: plain data, no torch."""
