"""The plain PyTorch backend: each op's formula as one reads it in the paper, in any dtype up to float64, on any device.

This is the specification. Autograd differentiates it, so it contains no gradient formula that could be wrong.
"""
