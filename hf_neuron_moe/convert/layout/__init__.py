"""The stored layouts: which tensors hold a weight, and how its values get there and back."""
