"""Floor 2, train: one job, from its config and data to a Hugging Face folder."""
