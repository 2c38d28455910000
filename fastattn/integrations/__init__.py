"""fastattn inside other libraries. Each module needs its library, and an extra of that name installs it."""
