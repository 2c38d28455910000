"""Random models and calls against their plain twins. A failing example can be read, and typed in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import families
import pytest
import torch
from catalogue import joined, some
from hypothesis import strategies as st
from model_checks import DEVICE, OPTIONS, PAD_SRC, PAD_TRG, VOCAB, check_steps, in_float64, transformer
from torch import Tensor

from fastattn import accelerate

pytestmark = pytest.mark.full
BOOL = st.booleans()


@st.composite
def batch(draw: Any, longest: int = 9) -> dict[str, Any]:
    """Padding before and after the tokens of each sequence, of which there is at least one."""
    B, drawn = draw(st.integers(1, 4)), {"seed": draw(st.integers(0, 99))}
    for side in ("src", "trg"):
        L = draw(st.integers(1, longest))
        ends = st.tuples(st.integers(0, L), st.integers(0, L)).map(sorted).filter(lambda pair: pair[0] < pair[1])
        drawn[side] = (L, draw(st.lists(st.just([0, L]) | ends, min_size=B, max_size=B)))
    return drawn


def tokens(drawn: dict[str, Any], side: str, pad: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Of one side of a batch: (B, L) tokens from 3 on, and which are no padding."""
    L, ends = drawn[side]
    generator = torch.Generator().manual_seed(drawn["seed"] + len(side) * L)
    place, ends = torch.arange(L), torch.tensor(ends)
    real = (place >= ends[:, :1]) & (place < ends[:, 1:])
    ids = torch.randint(3, vocabulary, real.shape, generator=generator)
    return ids.masked_fill(~real, pad).to(DEVICE), real.to(DEVICE)


WIDTHS = {"d_model": (8, 12, 33), "d_inner": (1, 16, 24), "n_head": (2, 4), "d_k": (1, 8, 12), "d_v": (3, 8)}
TRANSFORMER = st.fixed_dictionaries(
    {
        "model": joined(
            st.fixed_dictionaries({name: st.sampled_from(values) for name, values in WIDTHS.items()}),
            some(**{name: st.sampled_from(values) for name, values in OPTIONS.items() if name != "d_v"}),
        ),
        "batch": batch(),
    }
)


def test_transformer(fuzz: Callable[..., None]) -> None:
    """FusedTransformer with any options of its layers: outputs, loss and gradients, and the steps of decoding."""

    def compare(drawn: dict[str, Any]) -> None:
        model = drawn["model"] | {"d_word_vec": drawn["model"]["d_model"], "n_position": 12}
        models = transformer(**model)
        src, _ = tokens(drawn["batch"], "src", PAD_SRC, VOCAB)
        trg, _ = tokens(drawn["batch"], "trg", PAD_TRG, VOCAB)
        models = in_float64(models._replace(batch=(src, trg), targets=(trg,)))
        models.compare(atol=1e-8)
        loss = models.ours.loss(src, trg, trg, 0.1)
        torch.testing.assert_close(loss, models.loss(models.theirs), rtol=1e-6, atol=1e-8)
        check_steps(models, 1e-8)

    fuzz(compare, TRANSFORMER, share=0.5)


TORCH_NN = st.fixed_dictionaries(
    {
        "kind": st.sampled_from([kind for kind in families.KINDS if kind != "attention"]),
        "options": some(
            norm_first=BOOL,
            batch_first=BOOL,
            bias=BOOL,
            activation=st.sampled_from(("relu", "gelu")),
            nhead=st.sampled_from((1, 2)),
            dim_feedforward=st.sampled_from((1, 40)),
        ),
        "masks": st.tuples(*[st.sampled_from((None, torch.bool, torch.float32))] * 2),
        "is_3d": BOOL,
        "training": BOOL,
        "grad": BOOL,
    }
)


def test_torch_nn(fuzz: Callable[..., None]) -> None:
    """torch.nn's layers and stacks, accelerated, against untouched ones."""

    def compare(drawn: dict[str, Any]) -> None:
        kind, options, grad = drawn["kind"], drawn["options"], drawn["grad"]
        masks = families.masks_of(kind, drawn["masks"], drawn["is_3d"] and "nhead" not in options)
        inputs = families.tensors_of(kind, batch_first=options.get("batch_first", True)) | masks
        theirs, ours = (families.layer(kind, **options).train(drawn["training"]) for _ in range(2))
        accelerate(ours)
        with families.fast_path(False):
            expected = families.solve(theirs, inputs, grad=grad)
        families.check(families.solve(ours, inputs, grad=grad), expected, dict(rtol=1e-5, atol=2e-5))

    fuzz(compare, TORCH_NN, share=0.5)


HUGGINGFACE = st.fixed_dictionaries(
    {
        "name": st.sampled_from(("bart", "t5", "bert", "llama", "gpt2")),
        "batch": batch(),
        "training": BOOL,
        "grad": BOOL,
        "frozen": st.sampled_from(("nothing", "bias", "weight", "0")),
    }
)


def test_huggingface(fuzz: Callable[..., None]) -> None:
    """Models of transformers, accelerated, against untouched ones; some of their parameters frozen."""

    def compare(drawn: dict[str, Any]) -> None:
        theirs, ours = (families.FAMILIES[drawn["name"]].build().train(drawn["training"]) for _ in range(2))
        accelerate(ours)
        ids, real = tokens(drawn["batch"], "src", 1, 99)
        inputs = {"input_ids": ids, "attention_mask": real.long(), "use_cache": False}
        if theirs.config.is_encoder_decoder:
            ids, real = tokens(drawn["batch"], "trg", 1, 99)
            inputs |= {"decoder_input_ids": ids, "decoder_attention_mask": real.long()}
        for model in (theirs, ours):
            for name, p in model.named_parameters():
                p.requires_grad_(drawn["frozen"] not in name)
        expected = families.solve(theirs, inputs, real, drawn["grad"])
        families.check(families.solve(ours, inputs, real, drawn["grad"]), expected, dict(rtol=1e-4, atol=2e-4))

    fuzz(compare, HUGGINGFACE, share=0.5)
