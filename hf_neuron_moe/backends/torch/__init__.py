"""The contract computed with PyTorch: any device, fast on CPUs with and without bf16 instructions."""
