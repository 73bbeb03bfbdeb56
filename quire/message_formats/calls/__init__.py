"""The few kinds of syntax in which tool calls are written; the families are rows of `formats`."""
