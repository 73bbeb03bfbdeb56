"""Writing quantised checkpoints: `quire quantize`. The engine does not need this package, and it knows no engine."""
