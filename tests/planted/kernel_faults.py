"""Faults in the Triton kernels."""

from planted.fault import Fault

FAULTS: list[Fault] = []
