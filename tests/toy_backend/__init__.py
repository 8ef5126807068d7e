"""A backend of another package: one class, and one row in the table of backends."""
