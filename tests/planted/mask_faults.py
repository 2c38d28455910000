"""Faults in fastattn/masks."""

from planted.fault import Fault

FAULTS: list[Fault] = []
