"""Other libraries on fastattn: accelerate() for models of torch.nn and transformers. The latter needs its extra."""
