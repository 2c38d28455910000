"""Faults in fastattn/nn."""

from planted.fault import Fault

FAULTS: list[Fault] = [
    Fault("softcap of a layer ignored", "fastattn/nn/attention.py",
        '"enable_gqa": k.size(1) != q.size(1), "softcap": softcap}',
        '"enable_gqa": k.size(1) != q.size(1)}', "tests/nn/test_modules.py -k softcap"),
]  # fmt: skip
