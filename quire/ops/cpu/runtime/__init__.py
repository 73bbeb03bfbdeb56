"""What ops share to call the library: names of dtypes and weights, memory, and runs that are recorded."""
