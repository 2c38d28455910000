"""Checks of the arguments that build a module. Messages name the argument, what came and what was expected."""

from __future__ import annotations

from numbers import Real

from fastattn.backends import Backend, requested
from fastattn.masks._checks import check_sizes


def check_arguments(*, backend: Backend | None = None, **arguments: object) -> None:
    """ValueError unless each argument is a positive integer, or for one named *dropout a number from 0 to 1, and the
    backend's name is known. Errors are raised here and not in the first forward."""
    requested(backend)
    for name, value in arguments.items():
        if name.endswith("dropout"):
            if not isinstance(value, Real) or not 0 <= float(value) <= 1:
                raise ValueError(f"{name} must be a number from 0 to 1, the probability of dropping, got {value!r}")
        else:
            check_sizes(1, **{name: value})


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """ValueError unless the value is one of the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
