"""Faults in fastattn/integrations."""

from planted.fault import Fault

FAULTS: list[Fault] = []
