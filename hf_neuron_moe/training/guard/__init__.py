"""The guard of a training run: operands and results of every product on sampled steps, against bands and float64."""
