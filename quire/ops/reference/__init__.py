"""The ops in plain torch: the executable specification."""
