"""Precisions per block: compared with the stock model by training."""
