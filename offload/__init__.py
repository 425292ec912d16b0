"""Floor 1, move: make a model's tensors follow a plan, on a GPU or on a CPU."""
