"""The compute plane: one step on one device."""
