"""How a fuzz test runs."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase
from hypothesis.stateful import run_state_machine_as_test


@pytest.fixture
def fuzz(request: pytest.FixtureRequest) -> Callable[..., None]:
    """fuzz(check, strategy, share): check(example) for share * --fuzz examples. One that fails is made small. Without a
    strategy check is a RuleBasedStateMachine.

    In the everyday tier they are three, always the same. In the full tier they differ from run to run: a failure prints
    the seed that repeats it.
    """
    everyday = request.node.get_closest_marker("full") is None
    given_seed = request.config.getoption("--hypothesis-seed")

    def run(check: Callable[..., Any], strategy: Any = None, share: float = 1.0) -> None:
        settings = hypothesis.settings(
            max_examples=max(round(share * (3 if everyday else request.config.getoption("--fuzz"))), 1),
            derandomize=everyday,
            deadline=None,
            database=None,
            print_blob=True,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
            stateful_step_count=20,
        )
        if strategy is None:
            test = check
        else:
            test = hypothesis.given(strategy)(lambda example: check(example))  # hypothesis takes no partial
        if not everyday and given_seed is None:
            seed = random.SystemRandom().getrandbits(32)
            print(f"--hypothesis-seed={seed}")
            test = hypothesis.seed(seed)(test)
        if strategy is None:
            run_state_machine_as_test(test, settings=settings)
        else:
            settings(test)()

    return run
