"""Decoding without beams: the likeliest token at each step, or one drawn at random."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn.generate.loop import Decodable, OnToken, Search, check_limits, check_model, inference, run
from fastattn.ops._checks import check_number


class _Greedy(Search):
    """Search with W = 1."""

    has_kernel = True

    def pick(self, logits: Tensor) -> Tensor:
        """The next token of each sentence, (B,), from logits (B, n_vocab)."""
        best, token = logits.max(-1)  # of equal ones the first; NaN counts as the largest
        self.state["broken"] |= best.isnan()
        return token

    def choose(self, logits: Tensor) -> None:
        state, token = self.state, self.pick(logits[:, 0])
        state["done"] |= token == self.eos_idx
        state["tokens"].copy_(token[:, None])

    def result(self, state: dict[str, Tensor]) -> list[int]:
        # The newest token was not read by the model. What follows EOS came while others of the batch went on.
        tokens = [*state["fed"][1 : self.cache.length, 0].tolist(), *state["tokens"].tolist()]
        return tokens[: tokens.index(self.eos_idx)] if self.eos_idx in tokens else tokens


class _Sample(_Greedy):
    has_kernel = False

    def __init__(self, *arguments: Any, temperature: float, top_k: int | None, top_p: float, generator: Any) -> None:
        super().__init__(*arguments)
        self.temperature, self.top_k, self.top_p, self.generator = temperature, top_k, top_p, generator

    def pick(self, logits: Tensor) -> Tensor:
        logits = logits.float() / self.temperature
        if self.top_k is not None or self.top_p < 1:
            k = logits.shape[-1] if self.top_k is None else min(self.top_k, logits.shape[-1])
            logits, tokens = logits.topk(k)  # in falling order
            # A token stays if those before it have less than top_p of the probability. The first one always stays.
            weights = logits.softmax(-1)
            logits = logits.masked_fill((weights.cumsum(-1) - weights) >= self.top_p, -torch.inf)
        weights = logits.softmax(-1)
        self.note_nan(weights[:, :1])  # one NaN makes all NaN
        # Exponential race (Gumbel trick): argmax(w / Exp(1)) samples i with probability w_i, and waits for nothing.
        race = torch.empty_like(weights).exponential_(generator=self.generator)
        choice = (weights / race).argmax(-1, keepdim=True)
        return (choice if self.top_k is None and self.top_p == 1 else tokens.gather(-1, choice))[:, 0]


def greedy(
    model: Decodable, src_seq: Tensor, *, max_len: int, bos_idx: int, eos_idx: int, on_token: OnToken | None = None
) -> list[list[int]]:
    """The likeliest token at every step.

    model: a FusedTransformer, or another with `start_decoding` and `next_logits` (fastattn/generate/loop.py), or what
        wraps one as `module`, such as AveragedModel. It decodes in eval mode and returns to its own. Under
        torch.autocast it decodes in that dtype. After accelerate() also an unmodified BART, Marian, mBART, M2M100,
        Pegasus, Blenderbot or PLBart of transformers.
    src_seq: integer (B, Ls), of sentences of different lengths, padded at the end: padding counts as positions.
        Every sentence needs a token.
    max_len: the most tokens of an output, the final EOS included.     bos_idx, eos_idx: the first and the last token;
        with eos_idx=-1 no sentence ends before max_len.
    on_token: called after each step as on_token(step, sentences, tokens): step counts from 1, sentences are the rows of
        src_seq that are still decoded, tokens[i] the newest of sentence i, in a list. On a GPU each call waits for it.

    Returns for each sentence its token ids without BOS and EOS. A sentence that has ended leaves the batch.
    On a GPU a step is a CUDA graph, which is kept with its cache for later batches of the same shape: for each model up
    to 8 of them, of 65536 tokens in all (sentences * beams * max_len). ``generate.drop_graphs()`` frees them.
    Raises ValueError or TypeError naming the argument, ValueError where the model gives NaN.
    """
    model = check_model(model, max_len, bos_idx, eos_idx, on_token)
    with inference(model):
        return run(model, _Greedy(model.start_decoding(src_seq, 1, int(max_len)), bos_idx, eos_idx), on_token)


def sample(
    model: Decodable,
    src_seq: Tensor,
    *,
    max_len: int,
    bos_idx: int,
    eos_idx: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
    on_token: OnToken | None = None,
) -> list[list[int]]:
    """A token drawn at every step from softmax(logits / temperature). Other arguments and results: see ``greedy``.

    temperature: from 1e-30 to 1e30; below 1 likely tokens become likelier.
    top_k: only the k likeliest tokens are drawn from.
    top_p: only the likeliest tokens that have this share of the probability together, 0 < top_p <= 1, after top_k.
    generator: of src_seq's device; torch's own unless given.
    Source of top_p: Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration", arXiv:1904.09751.
    """
    check_number("temperature", temperature)
    if not 1e-30 <= temperature <= 1e30:  # logits / temperature must fit into float32
        raise ValueError(f"temperature must be from 1e-30 to 1e30, got {temperature}; greedy() is the limit at 0")
    check_number("top_p", top_p)
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1, got {top_p}")
    if top_k is not None:
        check_limits(top_k=top_k)
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator must be a torch.Generator or None, got {type(generator).__name__}")
    options: dict[str, Any] = {"temperature": float(temperature), "top_k": top_k, "top_p": float(top_p)}
    model = check_model(model, max_len, bos_idx, eos_idx, on_token)
    with inference(model):
        cache = model.start_decoding(src_seq, 1, int(max_len))
        search = _Sample(cache, bos_idx, eos_idx, generator=generator, **options)
        return run(model, search, on_token)
