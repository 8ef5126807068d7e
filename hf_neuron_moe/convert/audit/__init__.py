"""Looks at finished conversions: what they hold, whether they are intact, how far they are from their source."""
