"""What other libraries call to train in float8 with this package; each is imported by name, and needs that library."""
