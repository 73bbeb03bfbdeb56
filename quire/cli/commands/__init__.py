"""One file per command of `quire`, named after it. `quire.cli.parser` imports the one that is called."""
