"""Faults in fastattn/graphs."""

from planted.fault import Fault

FAULTS: list[Fault] = []
