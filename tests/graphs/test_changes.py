"""What changes of a model or of an optimizer need another graph, for everything that has graphs."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
from graph_twins import CHANGES, Calls, Searches, Steps, Twins, loss_of, model_to_change, own_loss_of
from model_checks import DEVICE
from recorded_graph import Recorder, recorder  # noqa: F401
from search_cases import accelerated, untouched

from fastattn.graphs.graphed_call import CHANGED, EAGER

USERS: dict[str, tuple[str, Callable[[], Twins]]] = {
    "loss": ("c", lambda: Calls(loss_of, model_to_change())),
    "own loss": ("c", lambda: Calls(own_loss_of, model_to_change())),
    "step": ("so", lambda: Steps(model_to_change())),
    "two calls a step": ("so", lambda: Steps(model_to_change(), accumulate=2)),
    "search": ("d", lambda: Searches(model_to_change())),
    "search of marian": ("h", lambda: Searches(accelerated(untouched("marian")).to(DEVICE))),
}
EVERYDAY = {
    "loss": ("new memory", "evaluation", "buffer", "layer shared", "a backward hook"),
    "own loss": ("encoder frozen",),
    "step": ("norm frozen", "betas", "optimizer's state"),
    "search of marian": ("a map's bias",),
    "search": ("weights in place", "new memory of a norm", "a forward hook"),
}
CASES = [
    pytest.param(user, change, marks=() if change in EVERYDAY.get(user, ()) else pytest.mark.full)
    for user, (kinds, _) in USERS.items()
    for change in CHANGES
    if {*kinds} & {*CHANGES[change].users}
]


@pytest.mark.parametrize(("user", "change"), CASES)
def test_change(user: str, change: str, recorder: Recorder) -> None:  # noqa: F811
    """Each costs a capture or none, or makes calls eager, with one warning. The numbers are right."""
    effect, users, apply = CHANGES[change]
    twins = USERS[user][1]().capture()
    twins.change(apply)
    captures, eager = recorder.captures, twins.stats.eager
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", RuntimeWarning)
        twins.capture()
        twins.check(7)
    is_eager, searches = effect not in ("kept", "captured"), user.startswith("search")
    made = recorder.captures - captures
    if effect == "kept":
        assert made == 0
    elif effect == "captured":
        assert made == (1 if users == "o" else twins.graphs)
    else:
        assert made == (2 * twins.graphs if searches else 0)
    assert [effect in str(w.message) for w in warned] == [True] * (is_eager and not searches)
    if not searches and users != "o":
        assert (twins.stats.eager - eager)[CHANGED] == (EAGER if effect == "captured" else 0)
