"""What MXFP8 does to a model: measured on its text, predicted per block, explained, and planned."""
