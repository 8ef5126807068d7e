"""``hf-neuron-moe demo``: one model trained three ways, stock, bf16 and mxfp8, and a page that compares them."""
