"""KV memory: which tokens are in which blocks, who shares them, where evicted ones go."""
