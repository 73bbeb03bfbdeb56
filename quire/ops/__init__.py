"""Ops: their contracts in `contracts.ops.Ops`, implementations by name in `backends`."""
