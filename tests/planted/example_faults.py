"""Faults in the examples."""

from planted.fault import Fault

FAULTS: list[Fault] = []
