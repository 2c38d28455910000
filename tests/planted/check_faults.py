"""Faults in fastattn/check and fastattn/backends."""

from planted.fault import Fault

FAULTS: list[Fault] = []
