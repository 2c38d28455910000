"""Is it right, and what is fastest, on this machine: explain, doctor and what they share."""
