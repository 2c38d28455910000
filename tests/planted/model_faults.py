"""Faults in fastattn/models."""

from planted.fault import Fault

FAULTS: list[Fault] = []
