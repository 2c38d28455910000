"""PyTorch's own operators: the default on a CPU, and on a GPU what a user would pick instead of our kernels."""
