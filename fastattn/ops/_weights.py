"""What attention's argument return_weights asks for, checked and brought into the form that backends take."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

# Heads in the order of the result, as ranges of equal steps, each of which is one launch; or what is made of all heads.
Wanted = tuple[range, ...] | Literal["mean", "argmax"]


def wanted(return_weights: bool | Sequence[int] | Literal["mean", "argmax"], heads: int) -> Wanted | None:
    """None where nothing is asked for. Raises TypeError or ValueError naming the argument."""
    if isinstance(return_weights, bool):
        return (range(heads),) if return_weights else None
    expected = f'expected a bool, a sequence of heads from 0 to {heads - 1}, "mean" or "argmax"'
    if isinstance(return_weights, str):
        if return_weights not in ("mean", "argmax"):
            raise ValueError(f"return_weights is {return_weights!r}, {expected}")
        if return_weights == "mean" and heads == 0:
            raise ValueError('return_weights is "mean", and query has no heads')
        return return_weights
    if not isinstance(return_weights, Sequence):
        raise TypeError(f"return_weights is of type {type(return_weights).__name__}, {expected}")
    if wrong := [h for h in return_weights if isinstance(h, bool) or not isinstance(h, int)]:
        raise TypeError(f"return_weights holds {wrong[0]!r} of type {type(wrong[0]).__name__}, {expected}")
    if not return_weights or any(not 0 <= h < heads for h in return_weights):
        raise ValueError(f"return_weights is {return_weights!r}, {expected}")
    return ranges(return_weights)


def ranges(heads: Iterable[int]) -> tuple[range, ...]:
    """The same heads in the same order: [0, 2, 4, 1] -> range(0, 6, 2), range(1, 2)."""
    runs: list[range] = []
    for h in heads:
        last = runs[-1] if runs else range(0)
        if len(last) == 1 and h != last[0]:
            step = h - last[0]
            runs[-1] = range(last[0], h + step, step)
        elif len(last) > 1 and h == last.stop:
            runs[-1] = range(last[0], h + last.step, last.step)
        else:
            runs.append(range(h, h + 1))
    return tuple(runs)
