"""The public implementation's Translator, with its results, on incremental decoding."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastattn.generate.beams import Beams
from fastattn.generate.loop import check_limits, check_token, inference, run, unwrapped
from fastattn.nn import DecoderCache


class Translator(nn.Module):
    """Beam search as in the class of this name in attention-is-all-you-need-pytorch, with the same results.

    It differs from ``beam_search``: beams go on after EOS and may be replaced; a sentence is done when all its beams
    contain EOS, and the best score / length^0.7 wins, where length ends with the first EOS but score does not; the
    logits are those of trg_word_prj, without the model's scale. Equal candidates come in the order of beams and tokens.

    model: a FusedTransformer, an accelerated text model of transformers (see ``greedy``), or what wraps one as
        `module`; it is set to eval mode.
    max_seq_len: the longest output in tokens, BOS included.
    Raises ValueError or TypeError naming the argument.
    """

    alpha = 0.7

    def __init__(
        self,
        model: nn.Module,
        beam_size: int,
        max_seq_len: int,
        src_pad_idx: int,
        trg_pad_idx: int,
        trg_bos_idx: int,
        trg_eos_idx: int,
    ) -> None:
        super().__init__()
        check_limits(beam_size=beam_size, max_seq_len=max_seq_len)
        if max_seq_len < 2:
            raise ValueError(f"max_seq_len must be at least 2, BOS and a token, got {max_seq_len}")
        model = unwrapped(model, "start_decoding", "next_logits", "src_pad_idx", "trg_pad_idx")
        check_token("trg_bos_idx", trg_bos_idx, model)
        check_token("trg_eos_idx", trg_eos_idx, model, minimum=-1)
        for name, index in (("src_pad_idx", src_pad_idx), ("trg_pad_idx", trg_pad_idx)):
            if index != getattr(model, name):
                raise ValueError(f"{name} is {index}, and the model's {getattr(model, name)}")
        self.model = model.eval()
        self.beam_size, self.max_seq_len = int(beam_size), int(max_seq_len)
        self.src_pad_idx, self.trg_pad_idx = src_pad_idx, trg_pad_idx
        self.trg_bos_idx, self.trg_eos_idx = trg_bos_idx, trg_eos_idx

    def translate_sentence(self, src_seq: Tensor) -> list[int]:
        """src_seq: integer (1, Ls). Returns token ids, BOS and EOS included. ValueError for other batches."""
        if len(src_seq) != 1:
            raise ValueError(f"src_seq holds {len(src_seq)} sentences, expected 1; translate() takes many")
        return self.translate(src_seq)[0]

    def translate(self, src_seq: Tensor) -> list[list[int]]:
        """What translate_sentence gives for each row of src_seq, integer (B, Ls), all in one batch."""
        with inference(self.model):
            cache = self.model.start_decoding(src_seq, self.beam_size, self.max_seq_len - 1)
            search = _PublicBeams(cache, self.trg_bos_idx, self.trg_eos_idx, self.alpha)
            found = run(_Unscaled(self.model) if hasattr(self.model, "trg_word_prj") else self.model, search)
        return [[self.trg_bos_idx, *tokens] for tokens in found]


class _Unscaled(nn.Module):
    """The model with the logits that the public Translator reads."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def next_logits(self, tokens: Tensor, cache: DecoderCache) -> Tensor:
        return cache.linear(self.model.trg_word_prj, self.model.decoder.step(tokens, cache), None)


class _PublicBeams(Beams):
    def __init__(self, cache: DecoderCache, bos_idx: int, eos_idx: int, alpha: float) -> None:
        super().__init__(cache, bos_idx, eos_idx)
        self.alpha = alpha
        self.state["end"] = torch.zeros_like(self.state["tokens"])  # tokens up to the first EOS, BOS included; 0: none

    def choose(self, logits: Tensor) -> None:
        state = self.state
        log_p, beam, token = self.candidates(logits, self.cache.rows)
        end = state["end"].gather(1, beam)
        length = self.cache.position + 1
        end = length.where((end == 0) & (token == self.eos_idx), end)
        # A sentence that is done stays as it is until it leaves the batch.
        is_active = ~state["done"][:, None]
        own = torch.arange(self.cache.rows, device=token.device).expand_as(beam)
        self.cache.reorder(beam.where(is_active, own))
        for name, new in (("tokens", token), ("log_p", log_p), ("end", end)):
            state[name].copy_(new.where(is_active, state[name]))
        # The public loop looks for EOS from its second step on.
        state["done"] |= (state["end"] > 0).all(1) & (self.cache.position > 1)

    def result(self, state: dict[str, Tensor]) -> list[int]:
        end, log_p = state["end"], state["log_p"]
        row = 0  # where some beam never ended, the public class takes the first
        if state["done"]:
            row = int((log_p / end.float() ** self.alpha).argmax())
        tokens = [*self.history(state, row), int(state["tokens"][row])]
        return tokens[: int(end[row]) - 1] if end[row] > 0 else tokens
