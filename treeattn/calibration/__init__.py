"""A cost model from measurements: what is timed, timing it, and the model that fits the times."""
