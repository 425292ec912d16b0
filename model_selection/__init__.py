"""Floor 3, choose: which of many models or adapters to train further, on one shared stream of weights."""
