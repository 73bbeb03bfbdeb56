"""Ops: contracts in `functional`, implementations behind one table."""
