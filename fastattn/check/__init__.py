"""Is it right, and what is fastest, on this machine: explain, doctor, tune and what they share."""
