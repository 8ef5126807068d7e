"""Matrix products and generation of the torch backend, tuned to CPUs."""
