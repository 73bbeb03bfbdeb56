"""Ops: their contracts in `contract.Ops`, implementations by name in `backends`."""
