"""The front desks: one public function an op, which checks its arguments, picks a backend and carries the gradient."""
