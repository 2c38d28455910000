"""Faults in fastattn/ops and in the backends reference and aten."""

from planted.fault import Fault

FAULTS: list[Fault] = []
