"""The public ops: one function each, which checks its arguments, picks a backend and carries the gradient."""
