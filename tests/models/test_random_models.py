"""Random models and batches against their plain twins. A failing example can be read, and typed in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from catalogue import joined, some
from hypothesis import strategies as st
from model_checks import DEVICE, PAD_SRC, PAD_TRG, VOCAB, check_steps, in_float64, transformer
from plain_transformer import ACTIVATIONS, GATES
from torch import Tensor

WIDTHS = {"d_model": (8, 12, 33), "d_inner": (1, 16, 24), "n_head": (2, 4), "d_k": (1, 8, 12), "d_v": (3, 8)}
OPTIONS: dict[str, tuple[Any, ...]] = {
    "activation": (*ACTIVATIONS, *GATES),
    "norm_first": (False, True),
    "n_head_kv": (None, 1, 2),
    "norm": ("layer", "rms"),
    "qk_norm": (False, True),
    "softcap": (None, 0.5),
    "attention_bias": (False, True),
    "scale_emb_or_prj": ("prj", "emb", "none"),
    "trg_emb_prj_weight_sharing": (True, False),
    "emb_src_trg_weight_sharing": (True, False),
    "pack_padding": (None, True),
    "backend": (None, "reference"),
}


@st.composite
def sentences(draw: Any, rows: int, pad: int) -> Tensor:
    """(rows, L) tokens with padding before and after the words, of which there is at least one."""
    L = draw(st.integers(1, 9))
    tokens = torch.randint(3, VOCAB, (rows, L), generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    for row in tokens:
        first, last = sorted(draw(st.tuples(st.integers(0, L - 1), st.integers(0, L - 1))))
        row[:first], row[last + 1 :] = pad, pad
    return tokens.to(DEVICE)


BATCH = st.integers(1, 4).flatmap(lambda rows: st.tuples(sentences(rows, PAD_SRC), sentences(rows, PAD_TRG)))
MODEL = joined(
    st.fixed_dictionaries({name: st.sampled_from(values) for name, values in WIDTHS.items()}),
    some(**{name: st.sampled_from(values) for name, values in OPTIONS.items()}),
)


@pytest.mark.parametrize("tier", ["everyday", pytest.param("full", marks=pytest.mark.full)])
def test_transformer(tier: str, fuzz: Callable[..., None]) -> None:
    """FusedTransformer with any options of its layers: outputs, loss and gradients, and the steps of decoding."""

    def compare(drawn: Any) -> None:
        options, (src, trg) = drawn
        models = transformer(**options, d_word_vec=options["d_model"], n_position=12)
        models = in_float64(models._replace(batch=(src, trg), targets=(trg,)))
        models.compare(atol=1e-8)
        loss = models.ours.loss(src, trg, trg, 0.1)
        torch.testing.assert_close(loss, models.loss(models.theirs), rtol=1e-6, atol=1e-8)
        check_steps(models, 1e-8)

    fuzz(compare, st.tuples(MODEL, BATCH), share=2 if tier == "everyday" else 1)
