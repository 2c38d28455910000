"""Faults in fastattn/generate."""

from planted.fault import Fault

FAULTS: list[Fault] = []
